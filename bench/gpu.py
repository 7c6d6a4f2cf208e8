"""The engine on an accelerator, compared with the bandwidth limit of a step: `python -m bench.gpu`, or the suite gpu.

The reference target is padded to the shape of a known model: its steps read the same bytes and multiply as much, and it
generates the tokens of the small model, so *acceptance is that of the small models*. Weights are made on the device; no
file is written. About half of the padding is zero, which draws less power than real weights.

Floor: the bytes that a plain step must read (weights, and the KV of its texts) over the bandwidth of a copy on this
device, and over the datasheet's. Plain and speculative decoding are the same loop (`bench.rows.rounds`), with the
host's part included; plain decoding has no drafter. Each of the two runs once before it is measured, over the same
texts, so that all passes are recorded. Both must generate the same tokens, except at near ties; at the first difference
of two texts the gap of the plain text's choice is reported, and a large gap is a bug.

The benchmark needs torch, numpy, safetensors, tokenizers, typer and rich, and no server.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from outrider.cli.command import FAILURE, reported
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from bench.rows.rounds import RoundGrowth, RoundRunner, RoundText
    from outrider.engine.checkpoints.padding import PaddedWeights
    from outrider.engine.gpu import DeviceEngine
    from outrider.engine.gpu.weights import DeviceDtype

ROOT = Path(__file__).parents[1]
SHAPES = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "tiny": "tiny"}
REFERENCE = "reference"  # a drafter without padding
DRAFTERS = {"8b": "1b", "1b": REFERENCE, "tiny": REFERENCE}
# Depth, beam, width and verified nodes, by concurrent texts: with more texts a step has less capacity for each.
GROWTHS = {1: (6, 4, 4, 15), 8: (4, 2, 3, 7), 32: (2, 1, 2, 3)}
DATASHEETS = {"H200": 4.8e12, "H100": 3.35e12}  # bytes per second, by a part of the device's name
NEAR_TIE = {"float8": 0.25, "bfloat16": 0.25, "float32": 1e-3}  # rounding may decide choices with smaller gaps
COPIED_BYTES = {"cuda": 2**32, "cpu": 2**27}
WIDTH = 140
NOTHING = (
    "gpu: nothing was run: torch sees no CUDA device here. Run it where there is one, or try the code out with "
    "--device cpu --shape tiny"
)


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one shape with one number of concurrent texts."""

    shape: str
    batch: int
    temperature: float
    context: int  # tokens of each text at its beginning
    tokens: int  # new tokens of each text, at least
    dtype: str
    parameters: int
    step_bytes: int  # bytes that a plain step must read
    copy_bytes_s: float  # bandwidth of a copy: bytes read and bytes written
    datasheet_bytes_s: float | None
    plain_step_ms: float
    plain_tok_s: float  # of all texts together
    drafter: str
    growth: tuple[int, ...]
    spec_step_ms: float
    spec_tok_s: float
    acceptance_length: float
    same: int  # texts that are equal, plain and speculative
    widest_gap: float  # largest gap of the plain text's choice at a first difference; 0: all texts are equal
    gpt_fast_step_ms: float | None

    @property
    def floor_ms(self) -> float:
        """Lower bound of a plain step, by the bandwidth of a copy."""
        return self.step_bytes / self.copy_bytes_s * 1e3

    @property
    def floor_fraction(self) -> float:
        """The floor over the time of a plain step; at most 1."""
        return self.floor_ms / self.plain_step_ms

    @property
    def datasheet_fraction(self) -> float | None:
        """The same fraction, by the datasheet's bandwidth."""
        if self.datasheet_bytes_s is None:
            return None
        return self.step_bytes / self.datasheet_bytes_s * 1e3 / self.plain_step_ms

    @property
    def ratio(self) -> float:
        """Speculative speed over plain speed."""
        return self.spec_tok_s / self.plain_tok_s

    @property
    def gpt_fast_tok_s(self) -> float | None:
        """Speed of gpt-fast's plain decoding."""
        return None if self.gpt_fast_step_ms is None else self.batch / self.gpt_fast_step_ms * 1e3

    @property
    def sound(self) -> bool:
        """Whether plain and speculative texts differ only at near ties."""
        return self.widest_gap < NEAR_TIE[self.dtype]

    @property
    def line(self) -> str:
        """The line for scripts."""
        figures = {
            "shape": self.shape,
            "batch": self.batch,
            "temperature": f"{self.temperature:g}",
            "floor_fraction": _shown(self.floor_fraction, 3),
            "datasheet_fraction": _shown(self.datasheet_fraction, 3),
            "plain_step_ms": _shown(self.plain_step_ms, 3),
            "plain_tok_s": _shown(self.plain_tok_s, 1),
            "spec_tok_s": _shown(self.spec_tok_s, 1),
            "ratio": _shown(self.ratio, 2),
            "acceptance_length": _shown(self.acceptance_length, 2),
            "same": f"{self.same}/{self.batch}",
            "widest_gap": _shown(self.widest_gap, 4),
            "gpt_fast_tok_s": _shown(self.gpt_fast_tok_s, 1),
        }
        return "gpu: " + " ".join(f"{name}={value}" for name, value in figures.items())


def main(
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="8b, 1b or tiny. [default: 1b, 8b]")] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="[default: 1, 8, 32]")] = None,
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="[default: 1]")] = None,
    device: Annotated[str | None, typer.Option(help="[default: cuda]")] = None,
    dtype: Annotated[Literal["float8", "bfloat16", "float32"] | None, typer.Option(help="[default: bfloat16]")] = None,
    drafter_dtype: Annotated[
        Literal["float8", "bfloat16", "float32"] | None, typer.Option(help="[default: that of the target]")
    ] = None,
    drafters: Annotated[list[str] | None, typer.Option("--drafter", help="1b, tiny or reference.")] = None,
    growths: Annotated[
        list[str] | None, typer.Option("--tree", metavar="BATCH=DEPTH,BEAM,WIDTH,NODES", help="May be repeated.")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of a text.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    gpt_fast: Annotated[Path | None, typer.Option(help="A checkout of gpt-fast, for plain steps beside ours.")] = None,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = ROOT / "models",
    texts: Annotated[Path, typer.Option(help="JSON lines with a prompt.")] = ROOT / "examples" / "held_out.jsonl",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="[default: by the time, in bench/results]")
    ] = None,
) -> None:
    """Run the benchmark. Print the line of each point as soon as it is measured."""
    import torch

    from bench.rows.rounds import RoundGrowth

    if device is None and not torch.cuda.is_available():
        print(NOTHING, flush=True)
        return
    with reported():
        from outrider.engine.gpu.devices import check_device

        chosen = str(check_device(device or "cuda"))
        for shape in shapes or ():
            _check("--shape", shape, SHAPES)
        for drafter in drafters or ():
            _check("--drafter", drafter, [REFERENCE, *SHAPES])
        trees = {batch: RoundGrowth(*sizes) for batch, sizes in GROWTHS.items()} | _trees(growths or ())
        path = output or ROOT / "bench" / "results" / time.strftime("gpu-%Y%m%d-%H%M%S.json")
        if output is None:
            path.parent.mkdir(exist_ok=True)
        if not path.parent.is_dir():
            raise ConfigError(f"--json: {path.parent} is not a folder")
        if chosen == "cpu":
            torch.set_num_threads(1)
        run = GpuRun(
            device=chosen,
            dtype=dtype or "bfloat16",
            drafter_dtype=drafter_dtype or dtype or "bfloat16",
            temperatures=tuple(temperatures or (1.0,)),
            batches=tuple(batches or (1, 8, 32)),
            trees=trees,
            context=context,
            tokens=tokens,
            repetitions=repetitions,
            gpt_fast=gpt_fast,
            models=models,
            texts=texts,
        )
        points: list[Point] = []
        for shape in shapes or ("1b", "8b"):
            for drafter in drafters or (DRAFTERS[shape],):
                for point in run.points(shape, drafter):
                    points.append(point)
                    print(point.line, flush=True)
                    _save(path, points, chosen)
    _show(points)
    print(f"gpu: wrote {path}")
    for point in points:
        print(point.line)
    if not all(point.sound for point in points):
        print("gpu: plain and speculative texts differ where rounding cannot explain it: a bug", file=sys.stderr)
        raise SystemExit(FAILURE)


@dataclass(frozen=True, slots=True)
class GpuRun:
    """The settings that all points share."""

    device: str
    dtype: DeviceDtype
    drafter_dtype: DeviceDtype
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    trees: dict[int, RoundGrowth]
    context: int
    tokens: int
    repetitions: int
    gpt_fast: Path | None
    models: Path
    texts: Path

    def points(self, shape: str, drafter: str) -> Iterator[Point]:
        """Yield all points of one shape with one drafter."""
        slots = max(self.batches)
        weights = self._weights("target", shape)
        target = self._engine(weights, slots, self.dtype)
        draft = self._engine(self._weights("drafter", drafter), slots, self.drafter_dtype)
        bandwidth, prompts = copy_bandwidth(self.device), self.prompts_of(slots)
        peers = {batch: self._gpt_fast(weights, prompts[:batch]) for batch in self.batches}
        for batch in self.batches:
            growth = self.trees[min(self.trees, key=lambda known: abs(known - batch))]
            for temperature in self.temperatures:
                yield self._point(
                    shape, drafter, target, draft, growth, prompts[:batch], temperature, bandwidth, peers[batch]
                )
        del target, draft, weights
        _free_memory()

    def _point(
        self,
        shape: str,
        drafter: str,
        target: DeviceEngine,
        draft: DeviceEngine,
        growth: RoundGrowth,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        bandwidth: float,
        gpt_fast_s: float | None,
    ) -> Point:
        from bench.rows.rounds import RoundRunner

        plain = self._measured(RoundRunner(target), prompts, temperature)
        spec = self._measured(RoundRunner(target, draft, growth), prompts, temperature)
        gaps = [
            _first_difference_gap(ours, theirs, self.tokens)
            for ours, theirs in zip(plain.texts, spec.texts, strict=True)
        ]
        rows = len(prompts) * (self.context + self.tokens / 2)
        return Point(
            shape=shape,
            batch=len(prompts),
            temperature=temperature,
            context=self.context,
            tokens=self.tokens,
            dtype=self.dtype,
            parameters=target.parameters,
            step_bytes=round(target.weight_bytes + rows * target.kv.row_bytes),
            copy_bytes_s=bandwidth,
            datasheet_bytes_s=datasheet(self.device),
            plain_step_ms=plain.step_s * 1e3,
            plain_tok_s=plain.tokens_per_s,
            drafter=drafter if self.drafter_dtype == self.dtype else f"{drafter} {self.drafter_dtype}",
            growth=tuple(growth),
            spec_step_ms=spec.step_s * 1e3,
            spec_tok_s=spec.tokens_per_s,
            acceptance_length=spec.tokens_per_step / len(prompts),
            same=sum(gap is None for gap in gaps),
            widest_gap=max((gap for gap in gaps if gap is not None), default=0.0),
            gpt_fast_step_ms=None if gpt_fast_s is None else gpt_fast_s * 1e3,
        )

    def _measured(self, rounds: RoundRunner, prompts: Sequence[Sequence[int]], temperature: float) -> Measured:
        """Measure one mode. The first run records the passes and does not count."""
        from bench.rows.rounds import RoundText
        from outrider.core.session.contract import Contract

        took: list[Measured] = []
        for repetition in range(1 + self.repetitions):
            texts = [
                RoundText(slot, [*prompt], Contract(seed=slot, max_tokens=2**20, temperature=temperature))
                for slot, prompt in enumerate(prompts)
            ]
            if repetition == 0:
                rounds.read(texts)
            for text in texts:
                text.verified = text.drafted = len(text.tokens) - 1
            times, committed = [], []
            _synchronize(self.device)
            while min(len(text.choices) for text in texts) < self.tokens:
                began = time.perf_counter()
                committed.append(rounds.step(texts))
                times.append(time.perf_counter() - began)
            if repetition:
                speed, steps = sum(committed) / sum(times), len(times)
                took.append(Measured(median(times), speed, sum(committed) / steps, texts))
        return sorted(took, key=lambda one: one.tokens_per_s)[len(took) // 2]

    def _weights(self, model: str, shape: str) -> PaddedWeights:
        from outrider.engine.checkpoints.checkpoint import Weights, read_config
        from outrider.engine.checkpoints.padding import PaddedShape, PaddedWeights, known_shape

        folder = self.models / model
        config = read_config(folder)
        new = PaddedShape.of(config) if shape == REFERENCE else known_shape(SHAPES[shape], config)
        return PaddedWeights(Weights(folder), config, new)

    def _engine(
        self, weights: PaddedWeights, slots: int, dtype: DeviceDtype, adapters: int = 0, heads: Path | None = None
    ) -> DeviceEngine:
        from outrider.engine.gpu import DeviceEagleDrafts, DeviceEngine
        from outrider.engine.heads.config import read_heads_config

        engine = DeviceEngine.of(
            weights,
            weights.config,
            b"",
            EngineSettings(
                device=self.device,
                dtype=dtype,
                slots=slots,
                adapters=adapters,
                features=None if heads is None else read_heads_config(heads).features,
                heads=heads,
            ),
        )
        if heads is not None:
            DeviceEagleDrafts(engine)
        engine.record()
        return engine

    def prompts_of(self, texts: int) -> list[list[int]]:
        """Return prompts of one length, cut from the concatenated held-out texts."""
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(self.models / "target" / "tokenizer.json"))
        lines = self.texts.read_text(encoding="utf-8").splitlines()
        ids = [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False).ids for line in lines if line]
        endless = (token for text in cycle(ids) for token in text)
        return [list(islice(endless, self.context)) for _ in range(texts)]

    def _gpt_fast(self, weights: PaddedWeights, prompts: Sequence[Sequence[int]]) -> float | None:
        if self.gpt_fast is None:
            return None
        from bench.peers.gpt_fast import step_seconds

        seconds = step_seconds(
            self.gpt_fast,
            weights,
            weights.config,
            device=self.device,
            dtype="bfloat16" if self.dtype == "float8" else self.dtype,
            prompts=prompts,
            steps=self.tokens,
            compiled=self.device != "cpu",
        )
        _free_memory()
        return seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """The repetition with the median speed, plain or speculative."""

    step_s: float  # median
    tokens_per_s: float
    tokens_per_step: float
    texts: list[RoundText]


def copy_bandwidth(device: str) -> float:
    """Return the bytes per second, read and written, of the fastest of some copies."""
    import torch

    kind = torch.device(device).type
    source = torch.ones(COPIED_BYTES[kind] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest = float("inf")
    for _ in range(8):
        _synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * source.nbytes / fastest


def datasheet(device: str) -> float | None:
    """Return the bytes per second in the device's datasheet; None for an unknown device."""
    import torch

    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    return next((rate for part, rate in DATASHEETS.items() if part in name), None)


def _first_difference_gap(plain: RoundText, other: RoundText, tokens: int) -> float | None:
    """Return the gap of the plain text's choice at the first difference within `tokens`; None if there is none."""
    for index, ours, theirs in zip(count(), plain.choices, other.choices, strict=False):
        if index < tokens and ours.token != theirs.token:
            return ours.gap
    return None


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check(flag: str, value: str, allowed: Sequence[str] | dict[str, str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag}: is '{value}', must be one of {', '.join(allowed)}")


def _trees(entries: Sequence[str]) -> dict[int, RoundGrowth]:
    from bench.rows.rounds import RoundGrowth

    trees = {}
    for entry in entries:
        batch, _, sizes = entry.partition("=")
        numbers = [batch, *sizes.split(",")]
        if len(numbers) != 5 or not all(number.isdigit() and int(number) for number in numbers):
            raise ConfigError(f"--tree: is '{entry}', must be BATCH=DEPTH,BEAM,WIDTH,NODES, all positive")
        trees[int(batch)] = RoundGrowth(*map(int, numbers[1:]))
    return trees


def _save(path: Path, points: Sequence[Point], device: str) -> None:
    import torch

    derived = ("floor_ms", "floor_fraction", "datasheet_fraction", "ratio", "gpt_fast_tok_s")
    content = {
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "points": [asdict(point) | {name: getattr(point, name) for name in derived} for point in points],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _show(points: Sequence[Point]) -> None:
    table = Table(box=SIMPLE, show_edge=False)
    columns = (
        "shape", "texts", "T", "plain\nms a step", "floor\nms", "of the\nfloor", "of the\ndatasheet", "plain\ntok/s",
        "drafter", "spec.\ntok/s", "\nratio", "accept.\nlength", "same\ntexts", "widest\ngap", "gpt-fast\ntok/s",
    )  # fmt: skip
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for it in points:
        table.add_row(
            it.shape,
            str(it.batch),
            f"{it.temperature:g}",
            _shown(it.plain_step_ms, 2),
            _shown(it.floor_ms, 2),
            _shown(it.floor_fraction, 2),
            _shown(it.datasheet_fraction, 2),
            _shown(it.plain_tok_s, 0),
            it.drafter,
            _shown(it.spec_tok_s, 0),
            _shown(it.ratio, 2),
            _shown(it.acceptance_length, 2),
            f"{it.same}/{it.batch}",
            _shown(it.widest_gap, 3),
            _shown(it.gpt_fast_tok_s, 0),
        )
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    screen.print(table)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
