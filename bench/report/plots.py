"""The plots of a run, as PNG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.report.figures import BenchResults
from outrider.cli.performance.samples import acceptance_by_depth


def online(rows: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Plot acceptance length over committed tokens, for each row; at 0 the traffic changes."""
    mpl.use("Agg")
    with _figure(path) as axes:
        for row, points in rows.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=row)
        axes.axvline(0, color="grey", linestyle="--")
        axes.set(xlabel="committed tokens since the traffic changed", ylabel="acceptance length")


def draw(results: BenchResults, json_path: Path) -> list[Path]:
    """Draw the plots for which there are results, beside their JSON as NAME-PLOT.png. Return the paths."""
    mpl.use("Agg")
    wanted: list[tuple[str, bool, Callable[[BenchResults, Axes], None]]] = [
        ("concurrency", bool(results.loads), _concurrency),
        ("distance", bool(results.far), _distance),
        ("depth", any(take.sample.tried_by_depth for take in results.takes), _depth),
        ("calibration", bool(results.profiles or results.loads), _calibration),
    ]
    paths = []
    for name, there, plot in wanted:
        if there:
            path = json_path.with_name(f"{json_path.stem}-{name}.png")
            with _figure(path) as axes:
                plot(results, axes)
            paths.append(path)
    return paths


@contextmanager
def _figure(path: Path) -> Iterator[Axes]:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    yield axes
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _concurrency(results: BenchResults, axes: Axes) -> None:
    for row in ("plain", "distributed"):
        callers = sorted({load.callers for load in results.loads})
        goodput = [
            median(load.goodput for load in results.loads if (load.row, load.callers) == (row, count))
            for count in callers
        ]
        axes.plot(callers, goodput, marker="o", label=row)
    axes.set_xscale("log", base=2)
    axes.set_xticks(callers, [str(count) for count in callers])
    axes.set(xlabel="callers", ylabel="durable tokens/s", title=f"{results.loads[0].target / 1e6:.0f}M under load")
    axes.set_ylim(bottom=0)


def _distance(results: BenchResults, axes: Axes) -> None:
    links = list(dict.fromkeys(take.link for take in results.far))
    for target, row in dict.fromkeys((take.target, take.row) for take in results.far):
        takes = [take for take in results.far if (take.target, take.row) == (target, row)]
        speeds = [median(take.sample.tokens_per_s for take in takes if take.link == link) for link in links]
        axes.plot(links, speeds, marker="o", label=f"{row}, {target / 1e6:.0f}M", ls=":" if row == "plain" else "-")
    axes.set(xlabel="link between drafter and verifier", ylabel="tokens/s, one session")
    axes.set_ylim(bottom=0)


def _depth(results: BenchResults, axes: Axes) -> None:
    largest = max(take.target for take in results.takes)
    for temperature in sorted({take.temperature for take in results.takes}):
        rates = acceptance_by_depth(
            take.sample
            for take in results.takes
            if (take.target, take.row, take.temperature) == (largest, "distributed", temperature)
        )
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=f"T = {temperature:g}")
    axes.set(xlabel="depth", ylabel="steps whose path reached it / steps that tried it", title="acceptance by depth")
    axes.set_ylim(0, 1)


def _calibration(results: BenchResults, axes: Axes) -> None:
    profiles = [*results.profiles, *(load.profile for load in results.loads)]
    known = [profile for profile in profiles if profile.predicted_ms == profile.predicted_ms]
    for target in sorted({profile.target for profile in known}):
        points = [(profile.predicted_ms, profile.forward_ms) for profile in known if profile.target == target]
        axes.scatter(*zip(*points, strict=True), label=f"{target / 1e6:.0f}M")
    end = max((max(profile.predicted_ms, profile.forward_ms) for profile in known), default=1.0)
    axes.plot([0, end], [0, end], color="grey", lw=1)
    axes.set(xlabel="pass, predicted by the cost model, ms", ylabel="pass, measured, ms", title="cost model")
