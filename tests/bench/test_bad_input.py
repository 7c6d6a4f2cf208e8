"""A bench that cannot measure all that it was asked for fails at once, and prints no line for scripts."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bench.peers.checkouts import parse_peers
from outrider.cli.performance.load import read_prompts
from outrider.errors import ConfigError

ROOT = Path(__file__).parents[2]


def bench(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--peer", "llama-server=/no-such"), ("llama-server is not there", "/no-such/build/bin/llama-server")),
        (("--router", "depht=3"), ("--router: depht: unknown key",)),
        (("--rule", "hopeful"), ("--rule: 'hopeful' must be one of target-match,", "block-verification")),
        (("--rule", "typical-acceptance"), ("--rule: 'typical-acceptance' must be one of",)),
        (("--drafts", "model"), ("--drafts: 'model' must be one of prompt-lookup, suffix, retrieval",)),
        (("--link", "wide"), ("--link: 'wide' must be a round trip in milliseconds, or one of jitter, narrow",)),
        (("--overlap", "ahead"), ("--overlap: 'ahead' must be one of measured, always, never, rounds, relayed, ",)),
    ],
    ids=["peer", "key", "rule", "lossy rule", "drafter of another row", "link", "overlap"],
)
def test_a_user_error_ends_the_bench_before_any_process_starts(
    arguments: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    done = bench("--quick", *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for fragment in fragments:
        assert fragment in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("entry", ["vllm=/tmp", "llama-server", "=/tmp"])
def test_an_unknown_peer_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(entry))):
        parse_peers([entry])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "holds no prompt"),
        ("\n\n", "holds no prompt"),
        ('{"prompt": ""}\n', "holds an empty prompt"),
        ('{"id": "x"}\n', "must hold JSON lines"),
        ("[1]\n", "must hold JSON lines"),
        ("def f(x):\n", "must hold JSON lines"),
    ],
)
def test_a_prompt_file_without_prompts_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem) as refused:
        read_prompts(file)
    assert str(file) in str(refused.value)


def test_prompts_are_read_with_their_names_and_chosen_by_their_ending(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a#short", "prompt": "x"}\n\n{"prompt": "y"}\n', encoding="utf-8")
    assert read_prompts(file) == [("a#short", "x"), ("3", "y")]
    assert read_prompts(file, "#short") == [("a#short", "x")]


def left(mark: str) -> list[str]:
    """Command lines of the processes that carry a mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_whole_run_ends_with_its_line_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(16)
    monkeypatch.setenv("BENCH_TEST", mark)
    small = ("--target", "20M", "--prompts", "1", "--repetitions", "1", "--max-tokens", "8", "--save", mark)
    try:
        done = bench("--quick", "--no-llama-cpp", *small, timeout=390)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(
            r"bench: spec_over_plain_t0=\d+\.\d\d spec_over_plain_t1=\d+\.\d\d over_assisted=\d+\.\d\d "
            r"plain_over_transformers=\d+\.\d\d distributed_over_in_process=\d+\.\d\d overhead_ms=\d+\.\d\d "
            r"bytes_per_token=\d+ fraction_of_floor=\d+\.\d\d step_over_floor=\d+\.\d\d over_llama_cpp_t0=- "
            r"over_llama_cpp_t1=-",
            done.stdout.splitlines()[-1],
        )
        saved = sorted(path.name.replace(mark, "") for path in (ROOT / "bench" / "results").glob(f"{mark}*"))
        assert saved == ["-calibration.png", "-depth.png", ".json"]
        assert [line for line in left(mark) if "pytest" not in line] == []
    finally:
        for path in (ROOT / "bench" / "results").glob(f"{mark}*"):
            path.unlink()


@pytest.mark.long
def test_an_interrupted_run_prints_no_line_and_leaves_no_process() -> None:
    mark = secrets.token_hex(16)
    command = [sys.executable, "-m", "bench", "--quick", "--no-llama-cpp", "--target", "20M"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "BENCH_TEST": mark}, **pipes) as running:
        for line in running.stderr:
            if "starting lookup" in line:
                assert any("bench.rows.worker" in process for process in left(mark))
                running.send_signal(signal.SIGINT)
                break
        printed = running.stdout.read()
    assert running.returncode == 130
    assert not printed
    assert left(mark) == []
