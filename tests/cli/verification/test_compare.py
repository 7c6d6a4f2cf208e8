"""The demo's judgement: identical, a near tie, or a bug; and its figures."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from outrider.cli.performance.report import last_line, print_report
from outrider.cli.verification.compare import TOLERANCE, GenerationPair, Verdict, repeated_share, verdict
from outrider.client import FinishReason, Generation, Usage


def generation(
    tokens: Sequence[int],
    gaps: Sequence[float] | None = None,
    *,
    text: str = "t",
    reason: FinishReason = FinishReason.LENGTH,
    steps: int = 1,
    decode_s: float = 1.0,
) -> Generation:
    usage = Usage(
        prompt_tokens=1,
        completion_tokens=len(tokens),
        steps=steps,
        verified=0,
        accepted=0,
        reached_by_depth=(),
        tried_by_depth=(),
        wire_bytes=30,
        first_token_s=0.0,
        total_s=decode_s,
        decode_s=decode_s,
    )
    leads = tuple(gaps) if gaps is not None else (5.0,) * len(tokens)
    return Generation(text, tuple(tokens), leads, reason, 0, "m", "s", usage)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (generation([1, 2, 3]), generation([1, 2, 3], [0.0, 0.0, 0.0]), Verdict.IDENTICAL),
        (generation([1, 2], [9, 0.24]), generation([1, 3], [9, 9]), Verdict.NEAR_TIE),
        (generation([1, 2], [9, 9]), generation([1, 3], [9, 0.24]), Verdict.NEAR_TIE),
        (generation([1, 2], [0.0, 0.25]), generation([1, 3], [0.0, 0.25]), Verdict.BUG),
        # What follows the first difference is another text.
        (generation([1, 2, 7], [9, 0.1, 9]), generation([1, 3, 8], [9, 9, 9]), Verdict.NEAR_TIE),
        (generation([1, 2, 7], [9, 9, 0.1]), generation([1, 3, 8], [9, 9, 0.1]), Verdict.BUG),
        # One ends where the other goes on.
        (generation([1], [9]), generation([1, 2], [9, 0.1]), Verdict.NEAR_TIE),
        (generation([1], [9]), generation([1, 2], [9, 9]), Verdict.BUG),
        # The same tokens must be the same text, ended by the same reason.
        (generation([1]), generation([1], text="u"), Verdict.BUG),
        (generation([1]), generation([1], reason=FinishReason.STOP), Verdict.BUG),
    ],
)
def test_the_first_difference_decides(first: Generation, second: Generation, expected: Verdict) -> None:
    assert verdict(first, second, TOLERANCE["bfloat16"]) is expected
    assert verdict(second, first, TOLERANCE["bfloat16"]) is expected


def test_float32_tolerates_far_less() -> None:
    first, second = generation([1], [0.01]), generation([2], [0.01])
    assert verdict(first, second, TOLERANCE["bfloat16"]) is Verdict.NEAR_TIE
    assert verdict(first, second, TOLERANCE["float32"]) is Verdict.BUG


def test_repeated_share_counts_ngrams_seen_earlier_in_their_own_text() -> None:
    assert repeated_share([range(100), range(100)]) == 0.0
    assert repeated_share([[1] * 13]) == pytest.approx(0.9)
    assert repeated_share([[1, 2, 3]]) == 0.0


PAIRS = [
    GenerationPair(0.6, generation([1] * 11, steps=11), generation([1] * 11, steps=4, decode_s=0.5), Verdict.IDENTICAL),
    GenerationPair(0.0, generation([1] * 11, steps=11), generation([1] * 11, steps=5, decode_s=0.5), Verdict.NEAR_TIE),
]


def test_the_last_line_is_for_scripts() -> None:
    assert last_line(PAIRS) == (
        "demo: texts=2 identical=1 near_ties=1 bugs=0 plain_tok_s=10.0 speculative_tok_s=20.0 "
        "speedup=2.00 acceptance_length=2.44"
    )


def test_the_table_fits_a_narrow_terminal() -> None:
    screen = Console(file=io.StringIO(), width=80)
    print_report(screen, PAIRS, 12.0)
    out = screen.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*(0\.6|0|all)\s", line)]
    assert [row[0] for row in rows] == ["0.6", "0", "all"]
    assert rows[0][1:] == ["10.0", "20.0", "2.00", "2.75", "11", "4", "3", "88%"]
    assert "…" not in out
    assert "The demo took 12 s." in " ".join(out.split())
