"""Schemas of others: taken in turns, refused by name, and answers judged by another library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.schemas import SchemaFigures, in_turns
from outrider.errors import ConfigError
from tests.e2e.conftest import ROOT


def suite(folder: Path) -> Path:
    """Two files as the JSON-Schema-Test-Suite has them."""
    kinds = [{"enum": ["red", "green"]}, {"not": {}}]
    colours = [{"description": f"colour {number}", "schema": schema} for number, schema in enumerate(kinds)]
    numbers = [{"description": "number", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}]
    (folder / "a.json").write_text(json.dumps(colours), encoding="utf-8")
    (folder / "b.json").write_text(json.dumps(numbers), encoding="utf-8")
    return folder


def test_schemas_of_several_files_are_interleaved(tmp_path: Path) -> None:
    assert [schema.name for schema in in_turns(suite(tmp_path))] == ["a: colour 0", "b: number", "a: colour 1"]
    with pytest.raises(ConfigError, match="has no JSON files"):
        in_turns(tmp_path / "missing")


def test_the_last_line_counts_invalid_and_refused_outputs() -> None:
    figures = SchemaFigures(["a"], outputs=4, ended=3, same=4, invalid=["a: 5"])
    figures.refused.update(["why", "why"])
    assert figures.last_line == "schemas: schemas=1 outputs=4 ended=3 valid=2 same=4 refused=2"


def test_answers_are_judged_in_a_cluster(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.schemas", str(suite(tmp_path)), "--schemas", "3", "--outputs", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    refused, last = done.stdout.splitlines()
    assert (
        refused
        == "refused 1: grammar: cannot be read: #/not cannot be followed by an answer; say what is allowed instead"
    )
    assert last == "schemas: schemas=2 outputs=4 ended=4 valid=4 same=4 refused=1"
