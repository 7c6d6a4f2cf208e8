"""`outrider simulate`: compares gamma policies on a simulated cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.command import reported

if TYPE_CHECKING:
    from outrider.core.control.depth.policies import GammaPolicy
    from outrider.simulation.deployment import DrafterKind, Scenario, SimulationOutcome

ROUNDS = ("rounds:1", "rounds:2", "rounds:4", "rounds:8")  # draft-then-verify rounds of chains
ROWS = ("off", *ROUNDS, "fixed:4", "fixed:16", "heuristic", "ema", "goodput")


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A TOML file, for example examples/simulations/shifting_load.toml.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy, fixed:DEPTH or rounds:DEPTH; may be repeated. [default: all]")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Ceiling on gamma.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, texts and jitter.")] = 0,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs with different seeds; the results are averages.")] = 1,
) -> None:
    """Compare gamma policies on a simulated cluster, which decides with the code of a real one.

    The simulation models how often the target agrees with its drafters, the durations of passes and tree levels, and
    network delays. Sessions are placed by load, prompts are read in chunks, and a session has one drafter.
    `fixed:DEPTH` sets a ceiling, within which the verifier chooses the nodes that are worth their time. `rounds:DEPTH`
    is the fixed gamma of other systems: a step waits for a chain of that depth, and verifies all of it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from outrider.config import load_section
    from outrider.simulation.deployment import Scenario, sum_outcomes

    with reported():
        loaded = load_section(Scenario, scenario)
        names = policy or ROWS
        for name in names:
            parse_policy(name)
        outcomes: dict[str, list[SimulationOutcome]] = {}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("simulating", total=len(names) * len(loaded.phase) * repetitions)
            for name in names:
                runs = (simulated_phases(loaded, name, depth, each) for each in range(seed, seed + repetitions))
                outcomes[name] = []
                for same_phase in zip(*runs, strict=True):
                    outcomes[name].append(sum_outcomes(same_phase))
                    progress.advance(task, repetitions)
    _print(loaded, outcomes)
    print(last_line(outcomes), flush=True)


def parse_policy(name: str) -> tuple[str, int]:
    """Return a policy's name and its depth, 0 if the text gives none. Raises ConfigError for an unknown policy."""
    from outrider.core.control.depth.policies import POLICIES
    from outrider.errors import ConfigError

    kind, _, depth = name.partition(":")
    if kind in POLICIES if not depth else kind in ("fixed", "rounds") and depth.isdigit() and 1 <= int(depth) <= 64:
        return kind, int(depth or 0)
    raise ConfigError(
        f"--policy: is {name!r}, must be one of {', '.join(sorted(POLICIES))}, or fixed:DEPTH or rounds:DEPTH with a "
        "depth of 1 to 64"
    )


def simulated_phases(scenario: Scenario, name: str, depth: int, seed: int) -> Iterator[SimulationOutcome]:
    """Simulate a scenario and yield the outcome of each phase. `depth`: ceiling of policies without a depth."""
    from outrider.core.control.depth.goodput import AcceptancePriors
    from outrider.core.control.depth.policies import policy
    from outrider.core.session.contract import Plan
    from outrider.simulation.cluster import SimulatedCluster

    kind, fixed = parse_policy(name)
    ceilings = Plan(depth=fixed or depth, nodes=24)
    priors: dict[str, AcceptancePriors] = defaultdict(AcceptancePriors)

    def make(text: DrafterKind) -> GammaPolicy:
        return policy(kind, ceilings, priors[text.name])

    return SimulatedCluster(scenario, make, seed).run()


def last_line(outcomes: dict[str, list[SimulationOutcome]]) -> str:
    """Return the line for scripts: the ratios of the policy goodput's result to the best fixed depth over all phases,
    and to no speculation in the worst phase."""
    figures = {}
    if goodput := outcomes.get("goodput"):
        for kind in ("rounds", "fixed"):
            totals = [total(phases) for name, phases in outcomes.items() if name.startswith(f"{kind}:")]
            if totals:
                figures[f"goodput_over_best_{kind}"] = total(goodput) / max(totals)
        if off := outcomes.get("off"):
            worst = min(ours.goodput / plain.goodput for ours, plain in zip(goodput, off, strict=True) if plain.tokens)
            figures["goodput_over_off_at_worst"] = worst
        figures["switches_per_s"] = max(phase.switches_per_second for phase in goodput)
    return " ".join(["simulate:", *(f"{name}={value:.2f}" for name, value in figures.items())])


def total(phases: list[SimulationOutcome]) -> float:
    """Return the tokens per second over all phases."""
    from outrider.simulation.deployment import sum_outcomes

    return sum_outcomes(phases).goodput


def _print(scenario: Scenario, outcomes: dict[str, list[SimulationOutcome]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from outrider.simulation.deployment import sum_outcomes

    table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens a second", no_wrap=True)
    for phase in scenario.phase:
        load = f"{phase.callers} callers" if phase.callers else f"{phase.rate:g}/s"
        table.add_column("\n".join((*phase.kinds, load, f"{phase.round_trip_ms:g} ms")), justify="right", no_wrap=True)
    for heading in ("all", "tokens\na step", "drafters\nbusy", "plans a s\nat most"):
        table.add_column(heading, justify="right", no_wrap=True)
    drafters = scenario.deployment.drafters
    for name, phases in outcomes.items():
        combined = sum_outcomes(phases)
        table.add_row(
            name,
            *(f"{phase.goodput:.0f}" for phase in phases),
            f"{combined.goodput:.0f}",
            f"{combined.acceptance_length:.2f}",
            f"{combined.drafting / combined.seconds / drafters:.0%}" if drafters else "",
            f"{max(phase.switches_per_second for phase in phases):.2f}",
        )
    Console(highlight=False, width=max(100, Console().width)).print(table)
