"""The table of results at the end of the demo."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from outrider.cli.command import figures_table
from outrider.cli.verification.compare import GenerationPair, Verdict, repeated_share
from outrider.client import Generation


def print_report(screen: Console, pairs: Sequence[GenerationPair], seconds: float) -> None:
    """Print a table with a row for each temperature and one for all, and a note on how to read it."""
    columns = ("T", "plain\ntok/s", "spec.\ntok/s", "\nspeedup", "accept.\nlength", "plain\nsteps", "spec.\nsteps")
    table = figures_table(*columns, "wire B\na token", "repeated\n4-grams")
    temperatures = list(dict.fromkeys(pair.temperature for pair in pairs))
    for temperature in temperatures:
        table.add_row(f"{temperature:g}", *_row([pair for pair in pairs if pair.temperature == temperature]))
    table.add_section()
    table.add_row("all", *_row(pairs))
    screen.print(table)
    screen.print(
        "tok/s: tokens after the first one over the time from the first to the last, measured by the router. "
        f"The demo took {seconds:.0f} s.",
        markup=False,
    )


def last_line(pairs: Sequence[GenerationPair]) -> str:
    """Return the line for scripts."""
    verdicts = [pair.verdict for pair in pairs]
    plain, speculative = _runs(pairs)
    return (
        f"demo: texts={len(pairs)} identical={verdicts.count(Verdict.IDENTICAL)} "
        f"near_ties={verdicts.count(Verdict.NEAR_TIE)} bugs={verdicts.count(Verdict.BUG)} "
        f"plain_tok_s={_speed(plain):.1f} speculative_tok_s={_speed(speculative):.1f} "
        f"speedup={_speedup(pairs):.2f} acceptance_length={_acceptance_length(speculative):.2f}"
    )


def _row(pairs: Sequence[GenerationPair]) -> list[str]:
    plain, speculative = _runs(pairs)
    tokens = sum(run.usage.completion_tokens for run in speculative)
    return [
        f"{_speed(plain):.1f}",
        f"{_speed(speculative):.1f}",
        f"{_speedup(pairs):.2f}",
        f"{_acceptance_length(speculative):.2f}",
        str(sum(run.usage.steps for run in plain)),
        str(sum(run.usage.steps for run in speculative)),
        f"{sum(run.usage.wire_bytes for run in speculative) / max(tokens, 1):.0f}",
        f"{repeated_share([run.token_ids for run in plain]):.0%}",
    ]


def _runs(pairs: Sequence[GenerationPair]) -> tuple[list[Generation], list[Generation]]:
    return [pair.plain for pair in pairs], [pair.speculative for pair in pairs]


def _speed(runs: Sequence[Generation]) -> float:
    seconds = sum(run.usage.decode_s for run in runs)
    tokens = sum(max(run.usage.completion_tokens - 1, 0) for run in runs)
    return tokens / seconds if seconds else 0.0


def _speedup(pairs: Sequence[GenerationPair]) -> float:
    plain, speculative = _runs(pairs)
    return _speed(speculative) / _speed(plain) if _speed(plain) else 0.0


def _acceptance_length(runs: Sequence[Generation]) -> float:
    steps = sum(run.usage.steps for run in runs)
    return sum(run.usage.completion_tokens for run in runs) / steps if steps else 0.0
