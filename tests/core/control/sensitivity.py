"""What becomes of the results if a constant of control is halved or doubled.

usage: python -m tests.core.control.sensitivity [PART_OF_A_NAME ...]

For each constant in the frozen dataclasses of control: by how many percent the tokens per second of simulated clusters
and the speed over plain decoding of the governor's plants change, on average, and the least speed of any ten seconds.
Runs with other seeds differ by 0.5 %. The table is in docs/control.md, "Constants".
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from statistics import mean
from typing import Any

import outrider.core.control as control
from outrider.core.control.arms.arm import Arm
from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.control.depth.policies import GammaPolicy, policy
from outrider.core.session.contract import Plan
from outrider.simulation.cluster import SimulatedCluster
from outrider.simulation.deployment import Deployment, DrafterKind, Scenario, TrafficPhase
from tests.core.control.plant import Plant

CEILINGS = Plan(depth=16, nodes=24)
SECONDS, PLANT_SECONDS = 15.0, 40.0
# Gains of drafting for all sessions: in turns, ahead; sessions; noise of a step's time; seconds of reading.
PLANTS = [(-0.3, -0.5, 4, 0.1, 0.03), (0.0, 0.0, 8, 0.25, 0.03), (0.1, 0.8, 8, 0.1, 0.01), (1.0, 0.3, 1, 0.1, 0.01)]
CLUSTERS = [(0.3, 4, 0.0), (0.8, 1, 20.0), (0.8, 4, 0.0), (0.8, 8, 20.0)]  # agreement, callers, ms of a round trip


def plant(turns: float, ahead: float, sessions: int, noise: float, reading_s: float) -> tuple[float, float]:
    """The speed over plain decoding, on average and in the worst ten seconds."""

    def speedup(arm: Arm, _: float) -> float:
        return 1.0 + {"turns": turns, "ahead": ahead}.get(arm.mode.value, 0.0) / max(1, arm.denominator)

    run = Plant(sessions, speedup, seed=sessions, noise=noise, reading_s=reading_s).run(PLANT_SECONDS)
    return run.over_plain(), run.worst_window()


def cluster(agreement: float, callers: int, trip_ms: float) -> float:
    """The tokens per second of a simulated cluster."""
    kind = DrafterKind(name="text", agreement=agreement)
    phase = TrafficPhase(seconds=SECONDS, kinds=("text",), callers=callers, round_trip_ms=trip_ms)
    priors = AcceptancePriors()

    def make(_: DrafterKind) -> GammaPolicy:
        return policy("goodput", CEILINGS, priors)

    scenario = Scenario(deployment=Deployment(contention=0.3), kind=[kind], phase=[phase])
    return next(iter(SimulatedCluster(scenario, make, 3).run())).goodput


def results() -> tuple[list[float], list[float], float]:
    """Tokens per second of all clusters, speeds of all plants, and the worst ten seconds of any plant."""
    plants = [plant(*each) for each in PLANTS]
    return [cluster(*each) for each in CLUSTERS], [speed for speed, _ in plants], min(worst for _, worst in plants)


def constants() -> Iterator[tuple[str, Any, str]]:
    """Each dataclass that holds numbers, by the name of its instance, and the names of its fields."""
    for module in pkgutil.walk_packages(control.__path__, control.__name__ + "."):
        for name, held in vars(importlib.import_module(module.name)).items():
            if name.isupper() and is_dataclass(held) and type(held).__module__ == module.name:
                yield from ((f"{name}.{field.name}", held, field.name) for field in fields(held))


def scaled(value: Any, factor: float) -> Any:
    """The value, or each of its numbers, multiplied; whole numbers are at least 1."""
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


def changed(before: list[float], after: list[float]) -> float:
    """The mean change in percent."""
    return 100.0 * (mean(new / old for new, old in zip(after, before, strict=True)) - 1.0)


def row(name: str, *cells: str) -> None:
    """Print a line of the table."""
    print(f"{name:30}", *(f"{cell:>9}" for cell in cells), flush=True)


def main() -> None:
    """The command."""
    base = results()
    row("", *("halved:", "plants", "worst", "doubled:", "plants", "worst"))
    row("as committed", "clusters", "", f"{base[2]:.3f}", "clusters")
    for name, held, field in constants():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        value, cells = getattr(held, field), list[str]()
        for factor in (0.5, 2.0):
            object.__setattr__(held, field, scaled(value, factor))
            try:
                clusters, plants, worst = results()
                cells += [f"{changed(base[0], clusters):+.1f} %", f"{changed(base[1], plants):+.1f} %", f"{worst:.3f}"]
            except ValueError:
                cells += ["invalid"] * 3
            object.__setattr__(held, field, value)
        row(name, *cells)


if __name__ == "__main__":
    main()
