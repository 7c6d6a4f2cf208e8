"""Compares the device's engine with the CPU's in float32, kind by kind: `python -m bench.gpu_parity`.

Both run the same passes over the reference target with random tokens: chunks of prompts, trees of several texts at
once, moves of committed rows, copies between slots, texts with adapters, and choices under shared noise. Prints the
widest gap between their logits for each kind; float32 sums in another order differ by about 1e-5. Adapters are compared
with weights into which they are merged. Choices are compared with those of the host's sampler on the same logits, so
they must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bench.low_rank_files import make_adapter, merge_adapter
from outrider.cli.command import FAILURE, reported
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.adapters.low_rank import MODULES
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import tree_mask
from outrider.engine.interface.settings import EngineSettings

ROOT = Path(__file__).parents[1]
LIMIT = 1e-3  # of a gap between two logits
SLOTS = 8
SEED = 20261126


class Parity:
    """Both engines, and the widest gap of each kind of work."""

    def __init__(self, model: Path, device: str) -> None:
        self.model = model
        self.device = DeviceEngine.load(
            model, EngineSettings(device=device, dtype="float32", slots=SLOTS, adapters=len(ADAPTERS))
        )
        self.host = CpuEngine.load(model, EngineSettings(dtype="float32", slots=SLOTS, threads=1))
        self.random = np.random.default_rng(SEED)
        self.gaps: dict[str, float] = {}

    def tokens(self, count: int) -> NDArray[np.int64]:
        """Return random tokens."""
        return self.random.integers(0, self.host.vocabulary, count)

    def forward(self, kind: str, segments: Sequence[Segment]) -> None:
        """Run a pass on both engines and note the gap between their logits."""
        self.compare(kind, self.device.forward(segments), self.host.forward(segments))

    def compare(self, kind: str, ours: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Note the gap between the logits of the engines."""
        gap = float(np.abs(ours - expected).max()) if expected.size else 0.0
        self.gaps[kind] = max(self.gaps.get(kind, 0.0), gap if np.isfinite(gap) else np.inf)

    def chain(self, slot: int, start: int, count: int, wanted: int | None = None) -> Segment:
        """Return a segment of random tokens behind the first `start` rows."""
        return Segment(slot, start, self.tokens(count), start + np.arange(count), None, wanted)

    def tree(self, slot: int, start: int, nodes: int) -> Segment:
        """Return a random tree below the row before `start`, whose nodes are rows from `start` on."""
        parents = [int(self.random.integers(-1, node)) for node in range(nodes)]
        depths = [0] * nodes
        for node, parent in enumerate(parents):
            depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
        mask = np.ascontiguousarray(tree_mask(1, [parent + 1 for parent in parents])[1:, 1:])
        return Segment(slot, start, self.tokens(nodes), start - 1 + np.array(depths), mask)


def chunks(both: Parity) -> None:
    """Prompts in chunks of many sizes, of one text and of several at once."""
    for sizes in ([1, 2, 3, 60, 64, 65, 128], [300, 1, 200], [513]):
        start = 0
        for size in sizes:
            both.forward("chunks", [both.chain(0, start, size)])
            start += size
    both.forward("chunks", [both.chain(slot, 0, count) for slot, count in ((3, 7), (1, 100), (6, 1), (2, 64))])


def trees(both: Parity) -> None:
    """Trees of several texts, whose lengths are very different, in one pass."""
    lengths = [1, 5, 63, 64, 65, 300, 700, 900]
    for slot, length in enumerate(lengths):
        both.forward("chunks", [both.chain(slot, 0, length, 0)])
    for _ in range(12):
        chosen = sorted(both.random.permutation(SLOTS)[: int(both.random.integers(1, SLOTS + 1))].tolist())
        sizes = both.random.integers(1, 25, len(chosen)).tolist()
        both.forward("trees", [both.tree(slot, lengths[slot], size) for slot, size in zip(chosen, sizes, strict=True)])


def moves(both: Parity) -> None:
    """Rounds of a tree and the move of one of its paths."""
    both.forward("chunks", [both.chain(4, 0, 50, 0)])
    length = 50
    for _ in range(20):
        tree = both.tree(4, length, 12)
        both.forward("moves", [tree])
        seen = np.flatnonzero(tree.seen[int(both.random.integers(0, 12))])
        for engine in (both.device, both.host):
            engine.move(4, length + seen, length + np.arange(len(seen)))
        length += len(seen)
    both.forward("moves", [both.chain(4, length, 3)])


def copies(both: Parity) -> None:
    """Copies of the first rows of a slot to another one, with a move before and after."""
    both.forward("chunks", [both.chain(0, 0, 200, 0)])
    for rows in (1, 64, 199):
        for engine in (both.device, both.host):
            engine.move(0, np.array([3, 5]), np.array([5, 3]))
            engine.copy(0, 7, rows)
            engine.move(0, np.array([rows]), np.array([0]))
        both.forward("copies", [both.chain(7, rows, 4), both.chain(0, 200, 2)])


def adapters(both: Parity) -> None:
    """Prompts and trees of texts with two adapters and without one, in the same passes."""
    config = read_config(both.model)
    with TemporaryDirectory(prefix="outrider-parity-") as name:
        scratch = Path(name)
        hosts: list[CpuEngine] = [both.host]
        handles: list[object] = [None]
        for seed, (rank, modules) in enumerate(ADAPTERS):
            files = make_adapter(scratch / f"a{seed}", config, rank, seed, modules=modules, deviation=0.05)
            merged = merge_adapter(both.model, files, scratch / f"m{seed}")
            hosts.append(CpuEngine.load(merged, EngineSettings(dtype="float32", slots=SLOTS, threads=1)))
            handles.append(both.device.load_adapter(files)[0])
    for sizes in ([1] * SLOTS, [3, 64, 1, 200, 17, 2, 90, 5]):
        prompts = [both.chain(slot, 0, size) for slot, size in enumerate(sizes)]
        for part in (prompts, [both.tree(slot, size, 12) for slot, size in enumerate(sizes)]):
            chosen = [slot % len(hosts) for slot in range(SLOTS)]
            changed = [replace(it, adapter=handles[which]) for it, which in zip(part, chosen, strict=True)]
            expected = [hosts[which].forward([it]) for it, which in zip(part, chosen, strict=True)]
            both.compare("adapters", both.device.forward(changed), np.concatenate(expected))


def choices(both: Parity) -> None:
    """Tokens under shared noise, with restrictions and without; the gap is 0 or infinite."""
    wrong = left = 0
    for terms in CHOSEN_UNDER:
        segments = [both.chain(slot, 0, 40) for slot in range(4)]
        contracts = [Contract(seed=slot, max_tokens=9, **terms) for slot in range(4)]
        samplers = [Sampler(contract, both.host.vocabulary, [1], 0) for contract in contracts]
        sampled = both.device.sample(segments, [sampler.draw(restricts=True, penalizes=True) for sampler in samplers])
        for row in range(4 * 40):
            slot, position = divmod(row, 40)
            path = segments[slot].tokens[1 : position + 1].tolist()
            chosen = sampled.choice(row)
            left += chosen is None  # to the host, where rounding could decide
            wrong += chosen is not None and chosen.token != samplers[slot].choose(sampled.row(row), path).token
    both.gaps["choices"] = np.inf if wrong or left > LEFT * 4 * 40 * len(CHOSEN_UNDER) else 0.0


CHOSEN_UNDER: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"min_p": 0.05, "logit_bias": {3: 4.0, 5: -2.0}, "banned_ids": (7, 9)},
    {"temperature": 0.0, "allowed_ids": tuple(range(100, 400))},
    {"logprobs": 5},
)
ADAPTERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (16, tuple(MODULES)),
    (5, ("q_proj", "v_proj", "down_proj")),
)  # ranks and linears
LEFT = 0.02  # largest share of rows for which the device may choose nothing
KINDS: Sequence[Callable[[Parity], None]] = (chunks, trees, moves, copies, adapters, choices)


def main(
    device: Annotated[str, typer.Option()] = "cuda",
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")] = ROOT / "models" / "target",
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Of work; may be repeated. [default: all]")] = None,
) -> None:
    """Compare the engines. End with status 1 if a gap is too wide."""
    with reported():
        both = Parity(model, device)
        for kind in KINDS:
            if not kinds or kind.__name__ in kinds:
                kind(both)
                print(f"parity: after {kind.__name__}: {shown(both)}", flush=True)
    print(f"parity: device={device} {shown(both)}")
    if max(both.gaps.values()) > LIMIT:
        raise SystemExit(FAILURE)


def shown(both: Parity) -> str:
    """Return the widest gaps as figures for scripts."""
    return " ".join(f"{kind}={gap:.2g}" for kind, gap in both.gaps.items())


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
