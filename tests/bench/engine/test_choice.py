"""The benchmark of the choice measures every way, in any vocabulary."""

import pytest

from bench.engine import choice


def test_every_sampling_term_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    choice.main(["--vocabulary", "400"])
    shown = capsys.readouterr().out
    assert "One choice of 400 tokens" in shown
    for name in choice.SAMPLING_TERMS:
        assert name.split()[0] in shown


def test_a_sampled_row_has_outstanding_logits_or_none() -> None:
    flat, sure = choice.row(5000, 0), choice.row(5000, 50)
    assert flat.max() < 9.0
    assert (sure > 9.0).sum() > 20
