"""Prints the tables at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.engine.formats import PROMPT, FormatSpeed
from bench.engine.passes import LLAMA_CPP, PassTime
from bench.peers.llama_worker import PASS_CONTEXT
from bench.report.figures import BenchResults, LoadFigures, Measurement, RowMemory, of_first_link, ratio, shown
from bench.tiers import beside
from outrider.cli.performance.samples import acceptance_length, bytes_per_token, percentile, spread
from outrider.cli.verification.compare import repeated_share

NOTES = (
    "tok/s: decode speed, the tokens after the first arrival over the time from it to the last one; median over the "
    "prompts and repetitions, with the interquartile range. x plain: median of the ratios of pairs (same prompt, "
    "temperature and repetition). A gap is the time between two arrivals; tokens that arrive together are one arrival. "
    "First tokens are measured with new prompts, for which no KV is cached. "
    "Padding does not change the acceptance: it is that of the small models in models/. Greedy, they fall into loops "
    "that any drafter predicts, as the repeated 4-grams show."
)


def print_tables(screen: Console, results: BenchResults) -> None:
    """Print the tables of all suites that the results contain."""
    for target in dict.fromkeys(take.target for take in results.takes):
        takes = [take for take in results.takes if take.target == target]
        firsts = [take for take in results.firsts if take.target == target]
        screen.print(_rows(takes, firsts, f"{target / 1e6:.0f}M, one session"))
        screen.print(_steps(results, target))
        screen.print(_memory([entry for entry in results.memory if entry.target == target]))
    if results.takes:
        screen.print(NOTES, markup=False)
    if results.loads:
        screen.print(_load(results))
        if {load.row for load in results.loads} - {"plain", "distributed"}:
            screen.print(_arms(results))
    for target in dict.fromkeys(take.target for take in results.far):
        screen.print(_distance([take for take in results.far if take.target == target], target))
    for target in dict.fromkeys(take.target for take in results.tiers):
        screen.print(_tiers([take for take in results.tiers if take.target == target], target))
    for entry in results.settling:
        after = "not yet" if entry.seconds is None else f"after {entry.seconds:.1f} s of decoding"
        screen.print(f"{entry.target / 1e6:.0f}M, T = {entry.temperature:g}: tiers chosen {after}", markup=False)
    for target in dict.fromkeys(entry.target for entry in results.passes):
        screen.print(_passes([entry for entry in results.passes if entry.target == target]))
    for result in results.formats:
        screen.print(_passes(result.passes))
        screen.print(_speeds(result.prompts, f"prompts of {PROMPT} tokens"))
        for gap in result.gaps:
            screen.print(f"logits of {len(gap.mean)} texts beside the dequantized model's, {gap}", markup=False)
        if result.texts:
            screen.print(_speeds(result.texts, "texts at temperature 1"))
        if result.start:
            screen.print(
                f"a verifier of the first type is ready after {result.start.seconds:.1f} s, and takes "
                f"{result.start.above_file_mb:.0f} MB more than its file",
                markup=False,
            )
    for line in results.gpu:
        screen.print(line, markup=False, soft_wrap=True)


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _rows(takes: Sequence[Measurement], firsts: Sequence[Measurement], title: str) -> Table:
    table = _table(
        title, "\nrow", "\nT", "\ntok/s", "\nIQR", "x\nplain", "accept.\nlength", "first tok.\np50 ms", "gap\np50 ms",
        "gap\np99 ms", "wire B\na token", "repeated\n4-grams",
    )  # fmt: skip
    for temperature in sorted({take.temperature for take in takes}):
        table.add_section()
        for row in dict.fromkeys(take.row for take in takes):
            both = [take for take in takes if take.temperature == temperature and take.row in (row, "plain")]
            samples = [take.sample for take in both if take.row == row]
            speeds = [sample.tokens_per_s for sample in samples]
            gaps = [gap * 1e3 for sample in samples for gap in sample.gaps]
            wired = bytes_per_token(samples)
            table.add_row(
                row,
                f"{temperature:g}",
                shown(median(speeds)),
                shown(spread(speeds)),
                shown(ratio(both, row, "plain"), 2),
                shown(acceptance_length(samples), 2),
                shown(percentile((take.sample.first_token_s * 1e3 for take in firsts if take.row == row), 50), 0),
                shown(percentile(gaps, 50)),
                shown(percentile(gaps, 99)),
                shown(wired or None, 0),
                f"{repeated_share([sample.tokens for sample in samples]):.0%}",
            )
    return table


def _steps(results: BenchResults, target: int) -> Table:
    limit = results.limits.get(target)
    title = "steps, p50"
    if limit:
        title += (
            f"; the limit on {limit.threads} threads: {limit.read_gb_s:.1f} GB/s read, "
            f"{limit.bfloat16_gflops:.0f} GFLOPS bfloat16, {limit.float32_gflops:.0f} float32"
        )
    table = _table(title, "row", "rows", "forward ms", "predicted", "waited", "overhead", "floor ms", "step / floor")
    for profile in results.profiles:
        if profile.target == target:
            table.add_row(
                profile.row,
                str(profile.rows),
                shown(profile.forward_ms, 2),
                shown(profile.predicted_ms, 2),
                shown(profile.waited_ms, 2),
                shown(profile.overhead_ms, 2),
                shown(profile.floor_ms, 2),
                shown(profile.of_floor, 2),
            )
    return table


def _memory(entries: Sequence[RowMemory]) -> Table:
    table = _table("memory, MB", "row", "process", "peak", "at the end", "peak above weights + KV", "at the end")
    for entry in entries:
        above = [shown(held - entry.fixed_mb, 0) for held in (entry.peak_mb, entry.resident_mb)]
        table.add_row(
            entry.row,
            entry.process,
            shown(entry.peak_mb, 0),
            shown(entry.resident_mb, 0),
            *(above if entry.fixed_mb else ["", ""]),
        )
    return table


def _load(results: BenchResults) -> Table:
    target = results.loads[0].target
    table = _table(
        f"{target / 1e6:.0f}M under load, short and long prompts", "callers", "plain\ntok/s", "distributed\ntok/s",
        "\nratio", "accept.\nlength", "rows in\na step", "first tok. p50 s\nplain", "first tok. p50 s\ndistributed",
        "gap p99 ms\nplain", "gap p99 ms\ndistributed", "first 10 s\nratio",
    )  # fmt: skip
    for callers in dict.fromkeys(load.callers for load in results.loads):
        found = [load for load in results.loads if load.callers == callers]
        plain, spec = ([load for load in found if load.row == row] for row in ("plain", "distributed"))
        cold = [it.goodput / it.plain for it in results.cold if it.callers == callers and it.plain]
        table.add_row(
            str(callers),
            shown(median(load.goodput for load in plain)),
            shown(median(load.goodput for load in spec)),
            shown(_over(plain, spec), 2),
            shown(median(load.acceptance_length for load in spec), 2),
            shown(median(load.profile.rows for load in spec), 0),
            shown(median(load.first_token_p50_s for load in plain), 2),
            shown(median(load.first_token_p50_s for load in spec), 2),
            shown(median(load.gap_p99_s for load in plain) * 1e3, 0),
            shown(median(load.gap_p99_s for load in spec) * 1e3, 0),
            shown(median(cold) if cold else None, 2),
        )
    return table


def _arms(results: BenchResults) -> Table:
    rows = [row for row in dict.fromkeys(load.row for load in results.loads) if row != "plain"]
    table = _table("Pinned arms under load, x plain", "callers", *rows)
    for callers in dict.fromkeys(load.callers for load in results.loads):
        found = {
            row: [load for load in results.loads if (load.callers, load.row) == (callers, row)]
            for row in ("plain", *rows)
        }
        table.add_row(str(callers), *(shown(_over(found["plain"], found[row]), 2) for row in rows))
    return table


def _over(plain: Sequence[LoadFigures], loads: Sequence[LoadFigures]) -> float:
    """Return the median ratio of the goodputs, not a number if there is none."""
    ratios = [load.goodput / one.goodput for one, load in zip(plain, loads, strict=True) if one.goodput]
    return median(ratios) if ratios else math.nan


def _distance(takes: Sequence[Measurement], target: int) -> Table:
    table = _table(
        f"{target / 1e6:.0f}M, drafter and verifier apart", "\nT", "\nlink", "\noverlap", "\ntok/s",
        "of the\nfirst link", "x\nplain", "accept.\nlength", "verifier\nidle", "drafter\nidle",
    )  # fmt: skip
    for temperature, link in sorted(
        dict.fromkeys((take.temperature, take.link) for take in takes), key=lambda pair: pair[0]
    ):
        table.add_section()
        for row in dict.fromkeys(take.row for take in takes):
            apart = [take for take in takes if (take.temperature, take.row) == (temperature, row)]
            here = [take for take in takes if (take.temperature, take.link) == (temperature, link)]
            samples = [take.sample for take in here if take.row == row]
            idle = [take.idle for take in here if take.row == row and take.idle is not None]
            table.add_row(
                f"{temperature:g}",
                link,
                row,
                shown(median(sample.tokens_per_s for sample in samples)),
                shown(of_first_link(apart, link), 2),
                shown(ratio(here, row, "plain"), 2),
                shown(acceptance_length(samples), 2),
                f"{percentile((shares.verifier for shares in idle), 50):.0%}",
                f"{percentile((shares.drafter for shares in idle), 50):.0%}",
            )
    return table


def _tiers(takes: Sequence[Measurement], target: int) -> Table:
    table = _table(
        f"{target / 1e6:.0f}M, tiers of drafters, the first of which drafts for the target", "tiers", "T", "tok/s",
        "x plain", "accept. length", "wire B a token",
    )  # fmt: skip
    for temperature in sorted({take.temperature for take in takes}):
        table.add_section()
        here = [take for take in takes if take.temperature == temperature]
        for row in dict.fromkeys(take.row for take in here if beside(take.row) in {other.row for other in here}):
            samples = [take.sample for take in here if take.row == row]
            table.add_row(
                row,
                f"{temperature:g}",
                shown(median(sample.tokens_per_s for sample in samples)),
                shown(ratio(here, row, beside(row)), 2),
                shown(acceptance_length(samples), 2),
                shown(bytes_per_token(samples) or None, 0),
            )
    return table


def _speeds(entries: Sequence[FormatSpeed], title: str) -> Table:
    """Tokens a second, and how many times each of llama.cpp's rows."""
    peers = [entry for entry in entries if entry.row.startswith(LLAMA_CPP)]
    names = list(dict.fromkeys(entry.row for entry in peers))
    target = entries[0].target
    table = _table(f"{title}, {target / 1e6:.0f}M", "weights", "row", "tokens/s", *(f"x {name}" for name in names))
    for entry in entries:
        over = {it.row: entry.over(it) for it in peers if it.dtype == entry.dtype}
        ratios = [shown(over.get(name), 2) for name in names]
        table.add_row(entry.dtype, entry.row, shown(median(entry.tokens_per_s)), *ratios)
    return table


def _passes(entries: Sequence[PassTime]) -> Table:
    target, threads = entries[0].target, entries[0].threads
    counts = list(dict.fromkeys(entry.rows for entry in entries))
    table = _table(
        f"passes of {target / 1e6:.0f}M behind {PASS_CONTEXT} tokens, {threads} thread{'' if threads == 1 else 's'}",
        "engine", "weights", "", *(f"{count} rows" if count > 1 else "1 row" for count in counts),
    )  # fmt: skip
    peers = {(entry.dtype, entry.rows): entry for entry in entries if entry.engine == LLAMA_CPP}
    only = {rows: entry for (_, rows), entry in peers.items()}  # of a table with one type of llama.cpp's
    for engine, dtype in dict.fromkeys((entry.engine, entry.dtype) for entry in entries):
        found = [entry for entry in entries if (entry.engine, entry.dtype) == (engine, dtype)]

        def peer_of(entry: PassTime) -> PassTime | None:
            return peers.get((entry.dtype, entry.rows), only.get(entry.rows))

        lines: list[tuple[str, list[float | None]]] = [
            ("ms", [entry.ms for entry in found]),
            ("x one row", [entry.over(found[0]) for entry in found]),
            ("x llama.cpp", [entry.over(peer) if (peer := peer_of(entry)) else None for entry in found]),
            ("x limit", [entry.over_limit for entry in found]),
        ]
        table.add_section()
        for what, figures in lines:
            table.add_row(engine, dtype, what, *(shown(figure, 2) for figure in figures))
    return table
