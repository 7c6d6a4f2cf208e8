"""How long a device waits for the host between two steps of plain decoding: `python -m bench.engine.gap`.

The verifier's scheduler runs as it does when it serves, and a reader takes each session's commits; there is no gRPC.
In place of a device stands a clock: a pass takes a fixed number of milliseconds. For each number of
sessions it prints the median and the ninth decile of the milliseconds between the end of a pass and the beginning of
the next: where the host begins each pass, and where the engine begins the next one by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.core.control.cost.budget import CostModel
from outrider.core.sampling.logprobs import ScoredTokens
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import OFF, Contract
from outrider.engine.following import FollowingPass
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine, Traits
from outrider.engine.interface.logits import Logits
from verifier_svc.commit_queue import StepCommit
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

WARM_UPS = 20  # passes
LONG = 100_000  # tokens


class ClockLogits:
    """Chooses a token for each row."""

    vocabulary = 128_256

    def row(self, index: int) -> Any:
        raise NotImplementedError

    def choice(self, index: int) -> Choice | None:
        return Choice(7 + index % 50, 1.0, b"")

    best = row

    def score(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
        raise NotImplementedError


class Clock(Engine):
    """Stands in for a device."""

    def __init__(self, slots: int, pass_s: float, *, runs_on: bool) -> None:
        super().__init__(
            Traits(
                vocabulary=ClockLogits.vocabulary,
                context=LONG,
                positions=LONG,
                rows=LONG,
                slots=slots,
                parameters=1,
                dtype="float32",
                numerics="fast",
                tokenizer_digest=b"",
                eos_ids=(),
                weight_bytes=1,
                kv_bytes=1,
                samples_tokens=True,
                restricts_tokens=True,
                frees_host=True,
                begins_next_pass=runs_on,
            )
        )
        self._pass_s = pass_s
        self._begun: frozenset[int] = frozenset()
        self._ends = 0.0
        self.passes: list[tuple[float, float]] = []  # when each began and ended

    def forward(self, segments: Sequence[Segment]) -> Any:
        raise NotImplementedError

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        if not self._begun.issuperset(it.slot for it in segments):
            self._begin()
        self._begun = frozenset()
        time.sleep(max(0.0, self._ends - time.perf_counter()))
        return ClockLogits()

    def run_on(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], following: FollowingPass
    ) -> tuple[Logits, frozenset[int]]:
        logits = self.sample(segments, draws)
        if following.wanted():
            self._begin()
            self._begun = frozenset(it.slot for it in segments)
        return logits, self._begun

    def move(self, *_: object) -> None:
        raise NotImplementedError

    def copy(self, *_: object) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        began = time.perf_counter()
        self._ends = began + self._pass_s
        self.passes.append((began, self._ends))


async def gaps(sessions: int, pass_ms: float, seconds: float, *, runs_on: bool) -> list[float]:
    """Return the milliseconds between passes."""
    engine = Clock(sessions, pass_ms / 1e3, runs_on=runs_on)
    cost = CostModel([(1, pass_ms / 1e3), (64, 1.1 * pass_ms / 1e3)])
    scheduler = StepScheduler(engine, cost, prefill_chunk=512, max_nodes=64, publish=lambda *_: None)
    opened = [*open_sessions(scheduler, sessions)]
    tasks = [asyncio.create_task(read(it)) for it in opened]
    tasks.append(asyncio.create_task(scheduler.run()))
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [1e3 * (later[0] - before[1]) for before, later in pairwise(engine.passes[WARM_UPS:])]


def open_sessions(scheduler: StepScheduler, count: int) -> Iterator[VerifierSession]:
    """Open sessions whose drafters are off."""
    for seed in range(count):
        contract = Contract(seed=seed, max_tokens=LONG // 2, temperature=1.0)
        yield scheduler.sessions.open(SessionStart(f"{seed}", "", 1, (1, 2, 3, 4), 4, contract, OFF, 1000))


async def read(session: VerifierSession) -> None:
    """Take a session's commits, as the stream to its router does."""
    while (commit := await session.commits.get()) is not None:
        assert isinstance(commit, StepCommit)  # no prompt's log-probabilities are wanted
        session.commits.acknowledge(commit.position + len(commit.choices))


def main(
    sessions: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. [default: 1, 8, 32, 128]")] = None,
    pass_ms: Annotated[float, typer.Option(min=0.1, help="Milliseconds of a pass.")] = 7.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each measurement.")] = 3.0,
) -> None:
    """Measure and print."""
    columns = ("sessions", "begun by the host: median", "9th decile", "by the engine: median", "9th decile")
    table = Table(*columns, title=f"milliseconds between passes of {pass_ms:g} ms")
    for count in sessions or (1, 8, 32, 128):
        cells = []
        for runs_on in (False, True):
            found = asyncio.run(gaps(count, pass_ms, seconds, runs_on=runs_on))
            cells += [f"{median(found):.2f}", f"{quantiles(found, n=10)[-1]:.2f}"]
        table.add_row(str(count), *cells)
    Console().print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
