"""`outrider plan`: computes by simulation how many drafters a deployment needs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.command import figures_table, reported
from outrider.cli.performance.simulate import parse_policy, simulated_phases, total

if TYPE_CHECKING:
    from outrider.simulation.deployment import Scenario, SimulationOutcome


class TargetEngine(StrEnum):
    """What verifies drafts."""

    OUTRIDER = "outrider"
    VLLM = "vllm"


ENOUGH = 0.97  # share of the highest goodput that counts as nearly as much


def plan(
    scenario: Annotated[Path, typer.Argument(help="A TOML file, for example examples/simulations/shifting_load.toml.")],
    most: Annotated[int, typer.Option(min=1, max=256, help="Largest number of drafters to try.")] = 8,
    policy: Annotated[str, typer.Option(help="The router's policy, or fixed:DEPTH.")] = "goodput",
    depth: Annotated[int, typer.Option(min=1, max=64, help="Ceiling on gamma.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, texts and jitter.")] = 0,
    engine: Annotated[
        TargetEngine, typer.Option(help="What verifies: our verifiers, or vLLM.")
    ] = TargetEngine.OUTRIDER,
    drafts: Annotated[int, typer.Option(min=1, max=64, help="vLLM's num_speculative_tokens.")] = 4,
) -> None:
    """Compute how many drafters a deployment's traffic needs, and how much faster it is with them.

    The scenario is simulated (see `outrider simulate`) with no drafters and with growing numbers of them. The result is
    the smallest number with nearly the highest goodput.
    """
    from rich.console import Console
    from rich.progress import track

    from outrider.config import load_section
    from outrider.simulation.deployment import Scenario

    with reported():
        parse_policy(policy)
        loaded = load_section(Scenario, scenario)
        chain = drafts if engine is TargetEngine.VLLM else loaded.deployment.chain
        outcomes: dict[int, list[SimulationOutcome]] = {}
        for count in track([0, *counts(most)], "simulating", console=Console(stderr=True), transient=True):
            deployment = loaded.deployment.model_copy(update={"drafters": count, "chain": chain})
            sized = loaded.model_copy(update={"deployment": deployment})
            outcomes[count] = list(simulated_phases(sized, policy if count else "off", depth, seed))
    _print(loaded, outcomes)
    print(last_line(outcomes), flush=True)


def counts(largest: int) -> list[int]:
    """Return the numbers of drafters to try: 1, 2, 3, 4, 6, 8, 12 and so on, up to and with `largest`."""
    steps = sorted({*(2**power for power in range(9)), *(3 * 2**power for power in range(7))})
    return [count for count in steps if count < largest] + [largest]


def fewest_sufficient(outcomes: dict[int, list[SimulationOutcome]]) -> int:
    """Return the smallest number of drafters whose goodput is at least ENOUGH times the highest one."""
    best = max(map(total, outcomes.values()))
    return min(count for count, phases in outcomes.items() if total(phases) >= ENOUGH * best)


def last_line(outcomes: dict[int, list[SimulationOutcome]]) -> str:
    """Return the line for scripts."""
    count = fewest_sufficient(outcomes)
    speedup = total(outcomes[count]) / total(outcomes[0])
    return f"plan: drafters={count} speedup={speedup:.2f} tokens_per_s={total(outcomes[count]):.1f}"


def _print(scenario: Scenario, outcomes: dict[int, list[SimulationOutcome]]) -> None:
    from rich.console import Console

    from outrider.simulation.deployment import sum_outcomes

    console = Console(highlight=False)
    table = figures_table("drafters", "tokens\na second", "times\nplain", "tokens\na step", "drafters\nbusy")
    for count, phases in outcomes.items():
        combined = sum_outcomes(phases)
        table.add_row(
            str(count),
            f"{combined.goodput:.0f}",
            f"{combined.goodput / total(outcomes[0]):.2f}",
            f"{combined.acceptance_length:.2f}",
            f"{combined.drafting / combined.seconds / count:.0%}" if count else "",
        )
    console.print(table)
    it = scenario.deployment
    passes = ", ".join(f"{tokens}: {took:g}" for tokens, took in sorted(it.pass_ms.items()))
    kinds = ", ".join(f"{kind.name} {kind.agreement:.0%}" for kind in scenario.kind)
    console.print(
        f"Assumed: {it.verifiers} verifier{'' if it.verifiers == 1 else 's'} with {it.slots} slots, whose passes take, "
        f"by tokens, {passes} ms; drafters whose tree levels take {it.level_ms:g} ms and {it.level_more_ms:g} for each "
        f"further session; the target agrees with one of a node's children: {kinds}. Prompts, delays and callers are "
        "those of the file.",
        markup=False,
    )
