"""The demo, small: a padded target, a whole cluster, both ways, the same texts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_demo_compares_every_text_and_ends_with_its_line() -> None:
    command = [sys.executable, "-m", "outrider.cli", "demo", "--prompts", "2", "--max-tokens", "12"]
    done = subprocess.run(
        [*command, "--parameters", "20M", "--dtype", "float32"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    servers = r"(router|drafter-0|verifier-0) \(pid \d+\) listens on 127\.0\.0\.1:\d+"
    assert all(re.fullmatch(servers, line) for line in done.stderr.splitlines()), done.stderr  # no library's noise
    *before, last = done.stdout.splitlines()
    match = re.fullmatch(
        r"demo: texts=4 identical=(\d+) near_ties=(\d+) bugs=0 plain_tok_s=\d+\.\d speculative_tok_s=\d+\.\d "
        r"speedup=\d+\.\d\d acceptance_length=\d+\.\d\d",
        last,
    )
    assert match
    assert int(match[1]) + int(match[2]) == 4
    text = "\n".join(before)
    assert text.count("plain:") == text.count("speculative:") == 4
    assert text.count("temperature 0.6  seed 2024") == text.count("temperature 0  seed 2024") == 1
