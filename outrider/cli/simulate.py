"""`outrider simulate`: gamma policies on a modelled cluster, before a real one is bought or changed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.reporting import reported

if TYPE_CHECKING:
    from outrider.core.control import GammaPolicy
    from outrider.simulation.cluster import NewPolicy
    from outrider.simulation.deployment import Kind, Outcome, Scenario

ROWS = ("off", "fixed:2", "fixed:4", "fixed:8", "fixed:16", "heuristic", "ema", "goodput")


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A TOML file, for example examples/simulations/shifting_load.toml.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy, or fixed:DEPTH; may be repeated. [default: all]")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Ceiling on gamma.")] = 24,
    seed: Annotated[int, typer.Option(help="Of arrivals, texts and jitter.")] = 0,
) -> None:
    """Compare gamma policies on a model of a cluster, in which the very code of a running one decides.

    What is modelled: how often the target agrees with its drafters, what passes and levels take, and delays. Sessions
    are placed by load, prompts are read in chunks, and a session has one drafter.
    """
    from rich.console import Console
    from rich.progress import Progress

    from outrider.config import load_section
    from outrider.simulation.cluster import Cluster
    from outrider.simulation.deployment import Scenario

    with reported():
        loaded = load_section(Scenario, scenario)
        makers = {name: maker(name, depth) for name in policy or ROWS}
        outcomes: dict[str, list[Outcome]] = {}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("simulating", total=len(makers) * len(loaded.phase))
            for name, make in makers.items():
                outcomes[name] = []
                for outcome in Cluster(loaded, make, seed).run():
                    outcomes[name].append(outcome)
                    progress.advance(task)
    _print(loaded, outcomes)
    print(last_line(outcomes), flush=True)


def maker(name: str, depth: int) -> NewPolicy:
    """New policies of a kind, for each session. Raises ConfigError for one that there is not."""
    from outrider.core.contract import Plan
    from outrider.core.control import policy
    from outrider.core.goodput import Lessons
    from outrider.errors import ConfigError, InvalidRequest

    kind, _, fixed = name.partition(":")
    if fixed and (kind != "fixed" or not fixed.isdigit() or not 1 <= int(fixed) <= 64):
        raise ConfigError(f"--policy: is {name!r}, must be a policy's name, or fixed:DEPTH with a depth of 1 to 64")
    ceilings = Plan(depth=int(fixed or depth), nodes=24)
    lessons: dict[str, Lessons] = defaultdict(Lessons)
    try:
        policy(kind, ceilings)
    except InvalidRequest as error:
        raise ConfigError(f"--policy: {str(error).partition(': ')[2]}") from None

    def make(text: Kind) -> GammaPolicy:
        return policy(kind, ceilings, lessons[text.name])

    return make


def last_line(outcomes: dict[str, list[Outcome]]) -> str:
    """The line for scripts: what goodput is over the best fixed depth, and at the worst over no speculation."""
    figures = {}
    if goodput := outcomes.get("goodput"):
        fixed = [total(phases) for name, phases in outcomes.items() if name.startswith("fixed:")]
        if fixed:
            figures["goodput_over_best_fixed"] = total(goodput) / max(fixed)
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
    for name in outcomes:
        table.add_column(name, justify="right", no_wrap=True)
    for index, phase in enumerate(scenario.phase):
        load = f"{phase.callers} callers" if phase.callers else f"{phase.rate:g}/s"
        what = f"{'+'.join(phase.kinds)}, {load}, {phase.round_trip_ms:g} ms"
        table.add_row(what, *(f"{phases[index].goodput:.0f}" for phases in outcomes.values()))
    table.add_section()
    table.add_row("all", *(f"{total(phases):.0f}" for phases in outcomes.values()))
    wholes = [together(phases) for phases in outcomes.values()]
    table.add_row("tokens a step", *(f"{whole.acceptance_length:.2f}" for whole in wholes))
    if drafters := scenario.deployment.drafters:
        table.add_row("drafters busy", *(f"{whole.drafting / whole.seconds / drafters:.0%}" for whole in wholes))
    switches = (max(it.switches_per_second for it in phases) for phases in outcomes.values())
    table.add_row("plans a second, at most", *(f"{each:.2f}" for each in switches))
    Console(highlight=False, width=max(100, Console().width)).print(table)
