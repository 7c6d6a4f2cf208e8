"""Masks are measured at every place of answers that their grammars allow."""

from __future__ import annotations

import sys

import pytest

from bench.engine import masks


def test_every_grammar_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(masks, "TEXT_BYTES", 200_000)
    monkeypatch.setattr(sys, "argv", ["masks", "--vocabulary", "2000"])
    masks.main()
    printed = capsys.readouterr().out
    assert "Microseconds at 2,000 ids" in printed
    assert all(name.split()[0] in printed for name in masks.CASES)
