"""`outrider plan`: how many drafters a deployment needs, before they are bought."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.reporting import reported
from outrider.cli.simulate import checked, simulated, total

if TYPE_CHECKING:
    from outrider.simulation.deployment import Outcome, Scenario

ENOUGH = 0.97  # of the most that any number of drafters brings


def plan(
    scenario: Annotated[Path, typer.Argument(help="A TOML file, for example examples/simulations/shifting_load.toml.")],
    most: Annotated[int, typer.Option(min=1, max=256, help="Drafters, at the most.")] = 8,
    policy: Annotated[str, typer.Option(help="The router's, or fixed:DEPTH.")] = "goodput",
    depth: Annotated[int, typer.Option(min=1, max=64, help="Ceiling on gamma.")] = 24,
    seed: Annotated[int, typer.Option(help="Of arrivals, texts and jitter.")] = 0,
) -> None:
    """Say how many drafters a deployment's traffic needs, and how much faster it is with them.

    The scenario is simulated (see `outrider simulate`) with none, one, two, four drafters and so on; wanted is the
    fewest that bring nearly as much as any number does.
    """
    from rich.console import Console
    from rich.progress import track

    from outrider.config import load_section
    from outrider.simulation.deployment import Scenario

    with reported():
        checked(policy)
        loaded = load_section(Scenario, scenario)
        outcomes: dict[int, list[Outcome]] = {}
        for count in track([0, *counts(most)], "simulating", console=Console(stderr=True), transient=True):
            deployment = loaded.deployment.model_copy(update={"drafters": count})
            sized = loaded.model_copy(update={"deployment": deployment})
            outcomes[count] = list(simulated(sized, policy if count else "off", depth, seed))
    _print(loaded, outcomes)
    print(last_line(outcomes), flush=True)


def counts(most: int) -> list[int]:
    """One, two, three, four, six, eight, twelve and so on, up to that many."""
    steps = sorted({*(2**power for power in range(9)), *(3 * 2**power for power in range(7))})
    return [count for count in steps if count < most] + [most]


def wanted(outcomes: dict[int, list[Outcome]]) -> int:
    """The fewest drafters that bring nearly as much as any number does; 0 where they bring nothing."""
    best = max(map(total, outcomes.values()))
    return min(count for count, phases in outcomes.items() if total(phases) >= ENOUGH * best)


def last_line(outcomes: dict[int, list[Outcome]]) -> str:
    """The line for scripts."""
    count = wanted(outcomes)
    speedup = total(outcomes[count]) / total(outcomes[0])
    return f"plan: drafters={count} speedup={speedup:.2f} tokens_per_s={total(outcomes[count]):.1f}"


def _print(scenario: Scenario, outcomes: dict[int, list[Outcome]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from outrider.simulation.deployment import together

    console = Console(highlight=False)
    table = Table(box=SIMPLE, show_edge=False)
    for heading in ("drafters", "tokens\na second", "times\nplain", "tokens\na step", "drafters\nbusy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for count, phases in outcomes.items():
        whole = together(phases)
        table.add_row(
            str(count),
            f"{whole.goodput:.0f}",
            f"{whole.goodput / total(outcomes[0]):.2f}",
            f"{whole.acceptance_length:.2f}",
            f"{whole.drafting / whole.seconds / count:.0%}" if count else "",
        )
    console.print(table)
    it = scenario.deployment
    passes = ", ".join(f"{tokens}: {took:g}" for tokens, took in sorted(it.pass_ms.items()))
    kinds = ", ".join(f"{kind.name} {kind.agreement:.0%}" for kind in scenario.kind)
    console.print(
        f"Assumed: {it.verifiers} verifier{'' if it.verifiers == 1 else 's'} of {it.slots} slots whose passes take, by "
        f"tokens, {passes} ms; drafters whose levels take {it.level_ms:g} ms and {it.level_more_ms:g} for each session "
        f"more; the target agrees with one of a node's children: {kinds}. Prompts, delays and callers are the file's.",
        markup=False,
    )
