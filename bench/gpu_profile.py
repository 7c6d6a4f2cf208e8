"""Where a step's time goes on a device, kernel by kernel: `python -m bench.gpu_profile --shape 8b --texts 1`.

The reference target at a known model's shape, as `bench.gpu` has it. Plain steps, and verifying steps of several rows a
text, without adapters or with some, are measured and then traced: milliseconds of a step, those until the host has
launched it, and the sum over all kernels; then the microseconds of each kernel in a step. With `--levels`, levels
that the device grows behind a drafter's step are measured beside as many steps of the host. With `--heads`, the
target has EAGLE-3 heads, and rounds of as many levels are measured, which begin with what a step keeps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from bench.gpu import ROOT, SHAPES, GpuRun
from bench.low_rank_files import make_adapter
from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.noise import Draw
from outrider.engine.gpu.sampling.token_choice import VERIFIED
from outrider.engine.growth import LEVEL_ROWS, MOST_LEVELS, Growth
from outrider.engine.heads.speculator import HeadRoot, KeptFeatures
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import tree_mask

if TYPE_CHECKING:
    from outrider.engine.checkpoints.checkpoint import ModelConfig
    from outrider.engine.gpu import DeviceEngine

STEPS = 12
WARM_UPS = 3
TOP = 16  # kernels shown
FOLLOWING = 7  # the token behind a prompt


def main(
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}.")] = "8b",
    texts: Annotated[int, typer.Option(min=1)] = 1,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a text in a step. [default: 1, 8, 16]")] = None,
    context: Annotated[int, typer.Option(min=16, help="Tokens of each text.")] = 512,
    adapters: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Adapters of all linears, which the texts have in turn. [default: 0]"),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of these adapters.")] = 16,
    best: Annotated[int, typer.Option(help="Candidates of a row, as a drafter needs them; 0: as a verifier.")] = 0,
    levels: Annotated[int, typer.Option(min=0, max=MOST_LEVELS, help="Levels grown behind a drafter's step.")] = 0,
    heads: Annotated[bool, typer.Option("--heads", help="EAGLE-3 heads, random ones, on the target.")] = False,
    device: Annotated[str, typer.Option()] = "cuda",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
) -> None:
    """Measure and trace steps."""
    import torch

    run = GpuRun(
        device=device, dtype=dtype, drafter_dtype=dtype, temperatures=(1.0,), batches=(texts,), trees={},  # type: ignore[arg-type]
        context=context, tokens=STEPS, repetitions=1, gpt_fast=None, models=ROOT / "models",
        texts=Path(ROOT / "examples" / "held_out.jsonl"),
    )  # fmt: skip
    began = time.perf_counter()
    weights, most = run._weights("target", shape), max(adapters or (0,))
    with TemporaryDirectory(prefix="outrider-profile-") as folder:
        folders = make_heads(Path(folder), weights.config) if heads else None
        engine = run._engine(weights, texts, dtype, most, folders)  # type: ignore[arg-type]
    loaded = time.perf_counter()
    print(
        f"profile: loaded and recorded in {loaded - began:.1f} s, weights {engine.weight_bytes / 1e9:.2f} GB",
        flush=True,
    )
    prompts = run.prompts_of(texts)
    for slot, prompt in enumerate(prompts):
        for start in range(0, context, 256):
            part = np.array(prompt[start : start + 256])
            engine.forward([Segment(slot, start, part, start + np.arange(len(part)), None, 0)])
            if engine.speculator is not None:
                kept = KeptFeatures(slot, start, range(len(part)), [*prompt, FOLLOWING][start : start + len(part) + 1])
                engine.speculator.add_features(engine.hidden(), [kept])
    handles = loaded_adapters(engine, weights.config, most, rank)
    for count, used in product(rows or (1, 8, 16), adapters or (0,)):
        segments, draws = work(texts, count, context, handles[:used])
        repeated = partial(engine.sample, segments, draws, best)
        began = time.perf_counter()
        repeated()
        recorded = time.perf_counter() - began
        for _ in range(WARM_UPS):
            repeated()
        times, launches = [], []
        for _ in range(STEPS):
            began = time.perf_counter()
            logits = engine._run(segments, draws, max(VERIFIED, best))
            launches.append(time.perf_counter() - began)
            logits.fetch()
            times.append(time.perf_counter() - began)
        wall_ms, launch_ms = median(times) * 1e3, median(launches) * 1e3
        busy_ms, kernels = traced(torch, repeated)
        print(
            f"profile: shape={shape} texts={texts} rows={count} dtype={dtype} best={best} adapters={used} rank={rank} "
            f"step_ms={wall_ms:.3f} launch_ms={launch_ms:.3f} busy_ms={busy_ms:.3f} record_s={recorded:.1f}"
        )
        if levels:
            grown_ms, stepped_ms = drafted(engine, segments, draws, levels)
            print(
                f"profile: shape={shape} texts={texts} rows={count} dtype={dtype} levels={1 + levels} "
                f"on_device_ms={grown_ms:.3f} by_host_ms={stepped_ms:.3f}"
            )
        if engine.speculator is not None:
            round_ms, features_ms = drafted_by_heads(torch, engine, segments, draws, prompts, levels)
            print(
                f"profile: shape={shape} texts={texts} rows={count} dtype={dtype} heads=eagle-3 levels={1 + levels} "
                f"round_ms={round_ms:.3f} features_ms={features_ms:.3f}"
            )
        for name, (calls, spent_us) in kernels[:TOP]:
            print(f"  {spent_us:9.1f} us {calls:6.1f} calls {spent_us / max(calls, 1e-9):8.2f} us each  {name[:90]}")


def loaded_adapters(engine: DeviceEngine, config: ModelConfig, count: int, rank: int) -> list[object]:
    """Return random adapters of all linears."""
    with TemporaryDirectory(prefix="outrider-profile-") as folder:
        made = [make_adapter(Path(folder) / f"{seed}", config, rank, seed) for seed in range(count)]
        return [engine.load_adapter(it)[0] for it in made]


def work(texts: int, rows: int, context: int, adapters: Sequence[object]) -> tuple[list[Segment], list[Draw]]:
    """Return the segments of a verifying step, a binary tree for each text or one row, and its draws. `adapters`: that
    the texts have in turn; none: they have none."""
    segments = []
    for slot in range(texts):
        mask = tree_mask(1, [node // 2 for node in range(rows - 1)]) if rows > 1 else None
        at = np.arange(rows)
        adapter = adapters[slot % len(adapters)] if adapters else None
        positions = context - 1 + np.minimum(at, 6)
        segments.append(Segment(slot, context - 1, at + 5, positions, mask, None, adapter))
    return segments, [Draw(slot, 1.0) for slot in range(texts)]


def drafted(
    engine: DeviceEngine, segments: Sequence[Segment], draws: Sequence[Draw], levels: int
) -> tuple[float, float]:
    """Return the milliseconds of a drafter's round of a level and `levels` more: where the device grows these, and
    where the host is given each level's candidates and makes nothing of them."""
    grows = [Growth(it.prefix + it.span, np.zeros(it.outputs), 1.0, 3, -20.0, 10**6) for it in segments]
    later = [
        replace(it, prefix=it.prefix + it.span, tokens=np.arange(LEVEL_ROWS), positions=at, mask=np.eye(LEVEL_ROWS) > 0)
        for it in segments
        for at in [np.full(LEVEL_ROWS, it.prefix + it.span)]
    ]
    grown, stepped = [], []
    for _ in range(WARM_UPS + STEPS):
        began = time.perf_counter()
        engine.grow(segments, draws, grows, levels)
        grown.append(time.perf_counter() - began)
        began = time.perf_counter()
        engine.sample(segments, draws, CANDIDATES)
        for _ in range(levels):
            engine.sample(later, draws, CANDIDATES)
        stepped.append(time.perf_counter() - began)
    return median(grown[WARM_UPS:]) * 1e3, median(stepped[WARM_UPS:]) * 1e3


def make_heads(folder: Path, config: ModelConfig) -> Path:
    """Write random EAGLE-3 heads for a target."""
    from outrider.engine.heads.checkpoint_io import make_network, save_network
    from outrider.engine.heads.config import make_heads_config

    shape = make_heads_config("eagle-3", config, depth=MOST_LEVELS + 1)
    save_network(folder, shape, make_network(shape))
    return folder


def drafted_by_heads(
    torch: Any,
    engine: DeviceEngine,
    segments: Sequence[Segment],
    draws: Sequence[Draw],
    prompts: Sequence[Sequence[int]],
    levels: int,
) -> tuple[float, float]:
    """Return the milliseconds of a round of a level and `levels` more below the last tokens, and of keeping a step's
    features."""
    assert engine.speculator is not None
    texts = [[*prompt, FOLLOWING] for prompt in prompts]
    growths = [Growth(len(text), np.zeros(1), 1.0, 3, -20.0, 10**6) for text in texts]
    roots = [
        HeadRoot(it.slot, text, draw, growth)
        for it, text, draw, growth in zip(segments, texts, draws, growths, strict=True)
    ]
    first = np.cumsum([0, *(len(it.tokens) for it in segments)])
    kept = [
        KeptFeatures(it.slot, it.prefix, [int(row)], text[it.prefix :])
        for it, text, row in zip(segments, texts, first, strict=False)
    ]
    rounds, keeping = [], []
    for _ in range(WARM_UPS + STEPS):
        engine.sample(segments, draws)
        began = time.perf_counter()
        engine.speculator.add_features(engine.hidden(), kept)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        keeping.append(time.perf_counter() - began)
        began = time.perf_counter()
        engine.speculator.begin(roots, levels)
        rounds.append(time.perf_counter() - began)
    return median(rounds[WARM_UPS:]) * 1e3, median(keeping[WARM_UPS:]) * 1e3


def traced(torch: Any, repeated: Any) -> tuple[float, list[tuple[str, tuple[float, float]]]]:
    """Return the milliseconds in which the device is busy in a step, and each kernel's calls and microseconds in it."""
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            repeated()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        if torch.cuda.is_available() == (event.device_type == torch.autograd.DeviceType.CUDA):
            sums[event.name][0] += 1 / STEPS
            sums[event.name][1] += event.time_range.elapsed_us() / STEPS
    ordered = sorted(((name, (calls, spent)) for name, (calls, spent) in sums.items()), key=lambda it: -it[1][1])
    return sum(spent for _, (_, spent) in ordered) / 1e3, ordered


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
