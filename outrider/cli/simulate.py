"""`outrider simulate`: gamma policies on a modelled cluster, before a real one is bought or changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.reporting import reported

if TYPE_CHECKING:
    from outrider.core.control import GammaPolicy
    from outrider.simulation.deployment import Kind, Outcome, Scenario

ROUNDS = ("rounds:1", "rounds:2", "rounds:4", "rounds:8")  # chains in rounds, every node of them verified
ROWS = ("off", *ROUNDS, "fixed:4", "fixed:16", "heuristic", "ema", "goodput")


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A TOML file, for example examples/simulations/shifting_load.toml.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy, fixed:DEPTH or rounds:DEPTH; may be repeated. [default: all]")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Ceiling on gamma.")] = 24,
    seed: Annotated[int, typer.Option(help="Of arrivals, texts and jitter.")] = 0,
    repetitions: Annotated[int, typer.Option(min=1, help="With other seeds; what is printed is of all.")] = 1,
) -> None:
    """Compare gamma policies on a model of a cluster, in which the very code of a running one decides.

    What is modelled: how often the target agrees with its drafters, what passes and levels take, and delays. Sessions
    are placed by load, prompts are read in chunks, and a session has one drafter. `fixed:DEPTH` sets a ceiling, within
    which the verifier takes what is worth its time; `rounds:DEPTH` is a fixed gamma as others have it: a step waits for
    a chain of that depth, and verifies all of it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from outrider.config import load_section
    from outrider.simulation.deployment import Scenario, together

    with reported():
        loaded = load_section(Scenario, scenario)
        names = policy or ROWS
        for name in names:
            checked(name)
        outcomes: dict[str, list[Outcome]] = {}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("simulating", total=len(names) * len(loaded.phase) * repetitions)
            for name in names:
                runs = (simulated(loaded, name, depth, each) for each in range(seed, seed + repetitions))
                outcomes[name] = []
                for same_phase in zip(*runs, strict=True):
                    outcomes[name].append(together(same_phase))
                    progress.advance(task, repetitions)
    _print(loaded, outcomes)
    print(last_line(outcomes), flush=True)


def checked(name: str) -> tuple[str, int]:
    """The policy and its depth, 0 where the name says none. Raises ConfigError for one that there is not."""
    from outrider.core.control import POLICIES
    from outrider.errors import ConfigError

    kind, _, depth = name.partition(":")
    if kind in POLICIES if not depth else kind in ("fixed", "rounds") and depth.isdigit() and 1 <= int(depth) <= 64:
        return kind, int(depth or 0)
    raise ConfigError(
        f"--policy: is {name!r}, must be one of {', '.join(sorted(POLICIES))}, or fixed:DEPTH or rounds:DEPTH with a "
        "depth of 1 to 64"
    )


def simulated(scenario: Scenario, name: str, depth: int, seed: int) -> Iterator[Outcome]:
    """What comes of each phase. `depth`: the ceiling of policies whose name says none."""
    from outrider.core.contract import Plan
    from outrider.core.control import policy
    from outrider.core.goodput import Lessons
    from outrider.simulation.cluster import Cluster

    kind, fixed = checked(name)
    ceilings = Plan(depth=fixed or depth, nodes=24)
    lessons: dict[str, Lessons] = defaultdict(Lessons)

    def make(text: Kind) -> GammaPolicy:
        return policy(kind, ceilings, lessons[text.name])

    return Cluster(scenario, make, seed).run()


def last_line(outcomes: dict[str, list[Outcome]]) -> str:
    """The line for scripts: goodput over the best depth for all phases, and over no speculation in the worst phase."""
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


def total(phases: list[Outcome]) -> float:
    """Tokens a second over all of them."""
    from outrider.simulation.deployment import together

    return together(phases).goodput


def _print(scenario: Scenario, outcomes: dict[str, list[Outcome]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from outrider.simulation.deployment import together

    table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens a second", no_wrap=True)
    for phase in scenario.phase:
        load = f"{phase.callers} callers" if phase.callers else f"{phase.rate:g}/s"
        table.add_column("\n".join((*phase.kinds, load, f"{phase.round_trip_ms:g} ms")), justify="right", no_wrap=True)
    for heading in ("all", "tokens\na step", "drafters\nbusy", "plans a s\nat most"):
        table.add_column(heading, justify="right", no_wrap=True)
    drafters = scenario.deployment.drafters
    for name, phases in outcomes.items():
        whole = together(phases)
        table.add_row(
            name,
            *(f"{phase.goodput:.0f}" for phase in phases),
            f"{whole.goodput:.0f}",
            f"{whole.acceptance_length:.2f}",
            f"{whole.drafting / whole.seconds / drafters:.0%}" if drafters else "",
            f"{max(phase.switches_per_second for phase in phases):.2f}",
        )
    Console(highlight=False, width=max(100, Console().width)).print(table)
