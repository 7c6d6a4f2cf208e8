"""Plots of a load's figures: tokens a second over callers, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from outrider.cli.performance.points import LoadPoint
from outrider.cli.performance.samples import acceptance_by_depth
from outrider.errors import ConfigError

KINDS = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """Raise ConfigError for a file that cannot be plotted to."""
    if file.suffix not in KINDS:
        raise ConfigError(f"--plot: {file} must end in {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot: needs matplotlib; pip install 'outrider[bench]'") from None


def draw(file: Path, points: Sequence[LoadPoint]) -> None:
    """Plot medians over repetitions. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speeds, depths = figure.subplots(1, 2)
    loads = sorted({point.callers for point in points})
    for speculative, name in ((False, "plain"), (True, "speculative")):
        at_load = [
            [point.goodput for point in points if (point.callers, point.speculative) == (callers, speculative)]
            for callers in loads
        ]
        speeds.plot(loads, [median(those) for those in at_load], marker="o", label=name)
    speeds.set(xlabel="callers", ylabel="tokens a second", xscale="log", ylim=(0, None), title="goodput")
    speeds.set_xticks(loads, [str(callers) for callers in loads])
    speeds.minorticks_off()
    speeds.legend()
    for callers in loads:
        steps = [point for point in points if point.callers == callers and point.speculative]
        shares = acceptance_by_depth(steps)
        if shares:
            depths.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{callers} callers")
    depths.set(xlabel="depth", ylabel="accepted of verified", ylim=(0, 1), title="acceptance by depth")
    if depths.lines:
        depths.legend()
    figure.savefig(file)
