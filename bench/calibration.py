"""`python -m bench.calibration`: what the simulator predicts, beside what clusters of this machine do.

What a simulation needs is read from clusters with one caller and no distance (`Readings`): the verifier's sweep and its
time outside passes, the drafter's times, how often drafts are accepted, and how much a drafter slows a pass, before it
and beside it. With it every case is simulated, and the same load is applied to a cluster. In pinned clusters the
verifier has a core of its own, as on two machines; in the others drafter and verifier share all cores.

All is drawn at T = 1: greedy, the small models loop, and drafters copy what repeats without a pass of theirs, which the
simulator does not model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.faults import FaultProxy
from bench.options import Drafts, padded_model
from bench.rows.cluster import BenchCluster, running
from bench.rows.engine_time import PAGE
from bench.rows.pinning import pinned, split_cores
from bench.tiers import JUDGED, MID
from outrider.cli.command import reported
from outrider.cli.performance.load import Load, LoadResult, Speculation, apply_load, read_prompts
from outrider.cli.performance.samples import Sample, steps_by_depth
from outrider.cli.performance.simulate import simulated_phases
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.rpc.lifecycle import run_until_signal
from outrider.simulation.deployment import Deployment, DrafterKind, Scenario, TrafficPhase

TEMPERATURES = (1.0,)
ANSWER = 64  # tokens
THINK_S = 0.01  # mean of callers' pauses
SALTS = 1000
SLOTS = 36
SEED = 2024
SIMULATIONS = 5  # of each case, with different seeds
DEPTH = 24  # ceiling on gamma, as in clusters
BEST = 0.8  # share of the best child where steps show nothing of it
SIBLINGS = np.array([12, 5, 3]) / 20  # of the children behind the best, their shares in what it leaves
LEVEL, TWO_LEVELS, TEXT = 8, 16, 128  # rows of a drafter's passes that are timed


class Machine(NamedTuple):
    """A deployment that is read, and then simulated."""

    target: int  # parameters that the target is padded to
    drafts: Drafts = "model"  # of the drafter
    pinned: bool = False  # whether the verifier has a core of its own
    model: str = "drafter"  # the drafters: "drafter", "mid", or "mid < drafter", where the first drafts for the second


class Case(NamedTuple):
    """A load that is predicted."""

    machine: Machine
    callers: int
    round_trip_ms: float = 0.0


class Passes(NamedTuple):
    """Sums over the steps of a load."""

    seconds: float  # of the verifier's passes
    alone: float  # seconds that the same steps would have taken without drafts
    drafted: float  # of the drafters' passes


@dataclass(frozen=True, slots=True)
class Readings:
    """What a simulation of a machine needs."""

    deployment: Deployment
    kind: DrafterKind
    nearest_ms: float  # round trip between drafter and verifier where there is no distance


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case with its speed over plain decoding."""

    case: Case
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The prediction over the measurement."""
        return self.predicted / self.measured


SHARED, APART = Machine(150_000_000), Machine(150_000_000, pinned=True)
LARGE, SUFFIX = Machine(400_000_000), Machine(150_000_000, "suffix")
MIDDLE, TIERS = Machine(400_000_000, model="mid"), Machine(400_000_000, model="mid < drafter")
CASES = (
    *(Case(SHARED, callers) for callers in (1, 4, 16, 32)),
    *(Case(APART, 1, round_trip_ms) for round_trip_ms in (5.0, 20.0, 50.0, 200.0)),
    Case(APART, 4),
    Case(LARGE, 1),
    Case(LARGE, 4),
    Case(SUFFIX, 1),
    Case(MIDDLE, 1),
    Case(TIERS, 1),
)


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Measured seconds of a row; half as many precede them.")] = 20.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 2,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
    save: Annotated[Path | None, typer.Option(help="JSON file for readings and outcomes.")] = None,
    only: Annotated[list[int] | None, typer.Option(help="Numbers of cases. [default: all]")] = None,
) -> None:
    """Predict and measure every case."""
    cases = [CASES[number] for number in only] if only else list(CASES)
    outcomes: list[Outcome] = []
    with reported():
        run_until_signal(_Calibration(models, texts, seconds, repetitions).run(cases, outcomes, save))
    _print(outcomes)
    print(last_line(outcomes), flush=True)


class _Calibration:
    """Measures cases, machine by machine."""

    def __init__(self, models: Path, texts: Path, seconds: float, repetitions: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
        self._prompts = [tuple(tokenizer.encode(text).ids) for _, text in read_prompts(texts, "#short")]
        self._models = models
        self._mid = models / "mid"  # padded while cases are measured
        self._seconds = seconds
        self._repetitions = repetitions
        self._progress = Console(stderr=True, highlight=False)

    async def run(self, cases: Sequence[Case], outcomes: list[Outcome], save: Path | None) -> None:
        """Add the outcome of each case, and save all, readings included."""
        readings: dict[Machine, Readings] = {}
        for machine in dict.fromkeys(case.machine for case in cases):
            async with (
                padded_model(self._models / "target", machine.target) as target,
                padded_model(self._models / "mid", MID) as self._mid,
            ):
                self._progress.print(f"{machine}: reading")
                readings[machine] = await self._read(machine, target)
                self._progress.print(f"{readings[machine]}")
                for case in cases:
                    if case.machine == machine:
                        measured = await self._measure(case, target)
                        predicted = predict(case, readings[machine], self._seconds, self._repetitions)
                        outcomes.append(Outcome(case, measured, predicted))
                        self._progress.print(f"{case}: measured {measured:.2f}, predicted {predicted:.2f}")
        if save is not None:
            await asyncio.to_thread(save.write_text, saved(readings, outcomes) + "\n", encoding="utf-8")

    async def _read(self, machine: Machine, target: Path) -> Readings:
        """Read a machine, from clusters with one caller."""
        async with self._cluster(machine, target, arm="turns") as cluster:
            await self._apply(cluster, 1, "off")
            described = await cluster.describe()
            pass_ms = {cost.tokens: cost.microseconds / 1e3 for cost in described.step_costs}
            result, turns = await self._passes(cluster, pass_ms)
            drafted = await cluster.describe()
            (first, *level) = (
                1e3 * delta["delay_s"]
                for delta in (await cluster.control("verifier-0"))["arrivals"]["sampled"]["fresh"]
            )
        prompt = round(fmean(len(tokens) + 1 for tokens in self._prompts))
        level_ms = median(level)
        more_ms, read_ms = await self._drafter_times(machine)
        slowdown = 0.0 if machine.pinned else max(0.0, turns.seconds / turns.alone - 1.0)
        deployment = Deployment(
            pass_ms=pass_ms,
            slots=SLOTS,
            level_ms=level_ms,
            level_more_ms=level_ms if more_ms is None else more_ms,
            read_ms=read_ms,
            overhead_ms=described.step_times.overhead_us / 1e3,
            trees_ms=max(0.0, (drafted.step_times.overhead_us - described.step_times.overhead_us) / 1e3),
            slowdown=slowdown,
            contention=0.0 if machine.pinned else await self._contention(machine, target, pass_ms, slowdown),
        )
        return Readings(deployment, kind_of("sampled", prompt, result.samples), max(0.0, first - level_ms))

    async def _drafter_times(self, machine: Machine) -> tuple[float | None, float]:
        """Return the milliseconds of one more session's level in a drafter's pass, and of a token to read. None: each
        session's level is worked on alone."""
        if machine.drafts != "model":
            return None, 0.0
        from outrider.engine.loading import load_engine

        drafter, threads = (self._models / "drafter", 1) if machine.model == "drafter" else (self._mid, 2)
        with pinned(split_cores().others) if machine.pinned else nullcontext():
            engine = await asyncio.to_thread(load_engine, drafter, dtype="bfloat16", threads=threads, slots=2)
            times = dict(await asyncio.to_thread(engine.measure_costs, (LEVEL, TWO_LEVELS, TEXT)))
        more, text = times[TWO_LEVELS] - times[LEVEL], times[TEXT] - times[LEVEL]
        return 1e3 * max(0.0, more), 1e3 * max(0.0, text) / (TEXT - LEVEL)

    async def _contention(self, machine: Machine, target: Path, pass_ms: dict[int, float], slowdown: float) -> float:
        """Return how much longer a pass becomes, for each second that the drafter drafts beside it."""
        async with self._cluster(machine, target, arm="ahead") as cluster:
            await self._apply(cluster, 1, None)
            _, passes = await self._passes(cluster, pass_ms)
        beside = passes.seconds - (1.0 + slowdown) * passes.alone
        return max(0.0, beside) / passes.drafted if passes.drafted else 0.0

    async def _passes(self, cluster: BenchCluster, pass_ms: dict[int, float]) -> tuple[LoadResult, Passes]:
        """Apply the load of one caller, and return what it gave and what its passes took."""
        names = ("outrider_step_forward_seconds_sum", "outrider_steps_total", "outrider_step_rows_total")

        async def read() -> list[float]:
            drafters = [name for name in cluster.pids() if name.startswith("drafter-")]
            busy = [await cluster.metric(name, "outrider_draft_forward_seconds_sum") for name in drafters]
            return [await cluster.metric("verifier-0", name) for name in names] + [sum(busy)]

        before = await read()
        result = await self._apply(cluster, 1, None)
        seconds, steps, rows, drafted = (now - then for now, then in zip(await read(), before, strict=True))
        alone = steps * float(np.interp(rows / steps, [*pass_ms], [*pass_ms.values()])) / 1e3
        return result, Passes(seconds, alone, drafted)

    async def _measure(self, case: Case, target: Path) -> float:
        """Return the goodput over plain decoding's, the median of some pairs."""
        ratios = []
        async with self._cluster(case.machine, target, round_trip_ms=case.round_trip_ms) as cluster:
            for repetition in range(self._repetitions):
                rows: list[Speculation] = ["off", None]
                if repetition % 2:
                    rows.reverse()
                goodput = {
                    row: (await self._apply(cluster, case.callers, row, seed=SEED + repetition)).goodput for row in rows
                }
                ratios.append(goodput[None] / goodput["off"])
        return median(ratios)

    async def _apply(
        self,
        cluster: BenchCluster,
        callers: int,
        speculation: Speculation,
        seed: int = SEED,
    ) -> LoadResult:
        load = Load(
            self._prompts, callers, self._seconds, self._seconds / 2, ANSWER, TEMPERATURES, THINK_S, seed, SALTS
        )
        return await apply_load(cluster.client, load, speculation=speculation)

    @asynccontextmanager
    async def _cluster(
        self, machine: Machine, target: Path, *, arm: str = "measured", round_trip_ms: float = 0.0
    ) -> AsyncIterator[BenchCluster]:
        """Start a cluster with a proxy between drafter and verifier if they are apart."""
        split = split_cores() if machine.pinned else None
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(FaultProxy("", delay_s=round_trip_ms / 2e3))
            tiers: Literal["all", "measured"] = "all" if machine.model == TIERS.model else "measured"
            config = ClusterConfig(
                router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, tiers=tiers),
                verifier=[
                    VerifierConfig(
                        model=target,
                        name="target",
                        threads=1 if machine.pinned else 2,
                        slots=SLOTS,
                        arm=arm,
                        metrics=PAGE["metrics"],
                    )
                ],
                **self._drafters(machine, proxy.address if round_trip_ms else None),
            )
            cluster = await stack.enter_async_context(running(config, split))
            proxy.target = cluster.verifier_address  # set before the first connection
            if split is not None:
                stack.enter_context(pinned(split.others))
            yield cluster

    def _drafters(self, machine: Machine, via: str | None) -> dict[str, Any]:
        """Return the sections of a cluster's drafters."""
        small = DrafterConfig(
            model=self._models / "drafter", drafts=machine.drafts, slots=SLOTS, via=via, metrics=PAGE["metrics"]
        )
        if machine.model == "drafter":
            return {"drafter": [small]}
        middle = DrafterConfig(
            model=self._mid, slots=SLOTS, via=via, metrics=PAGE["metrics"], level_nodes=JUDGED, threads=2
        )
        if machine.model == "mid":
            return {"drafter": [middle]}
        return {"tier": {0: [middle], 1: [small.model_copy(update={"tier": 1})]}}


def kind_of(name: str, prompt: int, samples: Iterable[Sample]) -> DrafterKind:
    """Return the kind of text whose paths survive as those of the samples did.

    A path reaches depth d with a chance of a (a r)^(d - 1): the agreement a, and r, the best child's share in it. Both
    are fitted to the steps that verified a node at d, by least squares of the logarithms; at d = 1 to all steps, as a
    lookup has nothing to propose in many of them.
    """
    samples = [*samples]
    reached, tried = steps_by_depth(samples)
    tried[:1] = sum(sample.steps for sample in samples)
    known = (reached > 0) & (tried > 0)
    depth, chance = np.flatnonzero(known), reached[known] / tried[known]
    agreement, best = 0.0, BEST
    if known.any():
        degree = min(1, len(depth) - 1)
        *slope, constant = np.polyfit(depth, np.log(chance), degree, w=np.sqrt(reached[known]))
        agreement = min(1.0, float(np.exp(constant)))
        best = min(1.0, float(np.exp(slope[0])) / agreement) if slope else BEST
    ranks = (best, *(float(share) for share in (1.0 - best) * SIBLINGS))
    return DrafterKind(name=name, agreement=agreement, ranks=ranks, prompt=prompt, answer=ANSWER)


def predict(case: Case, readings: Readings, seconds: float, repetitions: int) -> float:
    """Return the simulated goodput over that of plain decoding, the mean of some simulations."""
    kind = readings.kind
    far = readings.nearest_ms + case.round_trip_ms
    phases = [
        TrafficPhase(seconds=lasts, kinds=(kind.name,), callers=case.callers, round_trip_ms=far)
        for lasts in (seconds / 2, seconds) * repetitions
    ]
    scenario = Scenario(deployment=readings.deployment, kind=[kind], phase=phases)

    def goodput(policy: str) -> float:
        runs = ([*simulated_phases(scenario, policy, DEPTH, seed)] for seed in range(SIMULATIONS))
        return fmean(phase.goodput for run in runs for phase in run[1::2])

    return goodput("goodput") / goodput("off")


def saved(readings: dict[Machine, Readings], outcomes: Iterable[Outcome]) -> str:
    """Return the JSON of a run, from which `predict` can be repeated."""
    machines = [
        {
            "machine": machine._asdict(),
            "deployment": it.deployment.model_dump(),
            "kind": it.kind.model_dump(),
            "nearest_ms": it.nearest_ms,
        }
        for machine, it in readings.items()
    ]
    return json.dumps({"machines": machines, "outcomes": [asdict(outcome) for outcome in outcomes]}, indent=1)


def last_line(outcomes: Sequence[Outcome]) -> str:
    """Return the line for scripts: the predictions over the measurements, and the share of cases within a tenth."""
    if not outcomes:
        return "calibration: -"
    ratios = [outcome.ratio for outcome in outcomes]
    near = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    return f"calibration: least={min(ratios):.2f} most={max(ratios):.2f} within_a_tenth={near}/{len(ratios)}"


def _print(outcomes: Iterable[Outcome]) -> None:
    table = Table("target", "drafts", "model", "cores", "callers", "round trip", box=SIMPLE, show_edge=False)
    for name in ("measured", "predicted", "ratio"):
        table.add_column(name, justify="right")
    for it in outcomes:
        machine = it.case.machine
        table.add_row(
            f"{machine.target / 1e6:.0f}M",
            machine.drafts,
            machine.model,
            "one each" if machine.pinned else "shared",
            str(it.case.callers),
            f"{it.case.round_trip_ms:g} ms",
            *(f"{figure:.2f}" for figure in (it.measured, it.predicted, it.ratio)),
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
