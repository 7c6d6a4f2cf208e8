"""`outrider describe` times a file in our own engine and in llama.cpp, and names the one that "auto" takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.engine.loading import chosen_backend
from tests.engine.llama_cpp.test_engine import written
from tests.engine.small_checkpoints import MODELS

ROW = r"^ *{} +(\d+\.\d\d) +(\d+\.\d\d) *$"


def described(file: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["describe", str(file), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"describe: trees=yes decode_ms=\d+\.\d\d", result.stdout.splitlines()[-1])
    return result.stdout


def test_passes_of_both_engines_are_measured(tmp_path: Path) -> None:
    file = written(tmp_path, "Q8_0")
    text = described(file)
    assert re.search(r"^ *backend +1 token, ms +8 tokens, ms *$", text, re.MULTILINE)
    for backend in ("native", r"llama\.cpp"):
        ((one, eight),) = re.findall(ROW.format(backend), text, re.MULTILINE)
        assert 0 < float(one) < float(eight)
    assert f'Backend "auto" takes {chosen_backend(file, "auto")}:' in text


@pytest.mark.parametrize("options", [("--backend", "native"), ("--dtype", "bfloat16"), ("--layers", "1")])
def test_passes_of_an_engine_that_was_chosen_are_measured_alone(options: tuple[str, ...], tmp_path: Path) -> None:
    assert "llama.cpp" not in described(written(tmp_path, "Q8_0"), *options)


def test_a_file_that_llama_cpp_cannot_run_is_described() -> None:
    """A drafter's head of some ids alone is ours."""
    file = MODELS / "smollm2-drafter.gguf"
    assert f"llama.cpp does not run it: {file}: llama.cpp cannot load it" in described(file)
