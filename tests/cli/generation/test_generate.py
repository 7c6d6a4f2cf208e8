"""`outrider generate` against a scripted router."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import InternalError
from outrider.v1 import inference_pb2
from tests.client.conftest import WORDS, Fault, ScriptedRouter, router

__all__ = ["router"]  # the fixture


def test_text_goes_to_stdout_and_figures_to_stderr(router: ScriptedRouter) -> None:
    arguments = ["generate", "hello", "--address", router.address, "--seed", "4", "--stop", "a", "--stop", "b"]
    result = CliRunner().invoke(app, [*arguments, "--speculation", "off", "--temperature", "0"])
    assert result.exit_code == 0
    assert result.stdout == "".join(WORDS) + "\n"
    assert result.stderr == (
        "outrider: session session-1, 5 tokens, ended by length, seed 4, 1000.0 tok/s after a first token in 1 ms, "
        "acceptance length 2.50 over 2 steps, 15 wire bytes a token\n"
    )
    sampling = router.requests[0].sampling
    assert (list(sampling.stop), sampling.temperature) == (["a", "b"], 0.0)
    assert router.requests[0].speculation.policy == "off"


def test_the_router_may_be_named_by_a_profile(
    router: ScriptedRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_PROFILES", str(tmp_path / "profiles.toml"))
    (tmp_path / "profiles.toml").write_text(f'[here]\nrouter = "{router.address}"\n')
    result = CliRunner().invoke(app, ["generate", "hello", "--profile", "here"])
    assert (result.exit_code, result.stdout) == (0, "".join(WORDS) + "\n")
    result = CliRunner().invoke(app, ["generate", "hello", "--profile", "there"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("profiles.toml: has no profile 'there'; there are: here\n")


def test_work_that_can_wait_is_sent_with_its_priority(router: ScriptedRouter) -> None:
    result = CliRunner().invoke(app, ["generate", "hello", "--address", router.address, "--priority", "batch"])
    assert result.exit_code == 0
    assert router.requests[0].priority == inference_pb2.PRIORITY_BATCH


def test_the_prompt_may_come_from_stdin(router: ScriptedRouter) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--address", router.address], input="from\nstdin")
    assert result.exit_code == 0
    assert router.requests[0].text == "from\nstdin"


def test_a_chat_s_prompt_is_one_message_of_the_user(router: ScriptedRouter) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--chat", "--address", router.address], input="hi")
    assert result.exit_code == 0
    assert router.requests[0].WhichOneof("prompt") is None
    assert [(message.role, message.content) for message in router.requests[0].messages] == [("user", "hi")]


@pytest.mark.parametrize(("prompt", "message"), [("refused", "prompt: is refused"), ("overloaded", "all slots")])
def test_a_refusal_is_a_message_and_status_2(router: ScriptedRouter, prompt: str, message: str) -> None:
    result = CliRunner().invoke(app, ["generate", prompt, "--address", router.address])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"outrider: {message}")


def test_a_bug_of_the_server_is_status_1(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(3, InternalError("the server's log has the details"))])
    result = CliRunner().invoke(app, ["generate", "hello", "--address", router.address])
    assert result.exit_code == 1
    assert "the server's log" in result.stderr


def test_a_further_turn_names_its_session_and_a_fork_is_named_as_one(router: ScriptedRouter) -> None:
    arguments = ["--address", router.address, "--session", "session-1"]
    CliRunner().invoke(app, ["generate", "hello", "--address", router.address])
    turn = CliRunner().invoke(app, ["generate", "more", *arguments])
    assert turn.stderr.startswith("outrider: session session-1, 5 tokens")
    fork = CliRunner().invoke(app, ["generate", "other", *arguments, "--whole-history"])
    assert fork.stderr.startswith("outrider: session fork-3 (forked from session-1), 5 tokens")
    assert [(request.session_id, request.whole_history) for request in router.requests] == [
        ("", False),
        ("session-1", False),
        ("session-1", True),
    ]


def test_log_probabilities_follow_the_text_as_a_table(router: ScriptedRouter) -> None:
    arguments = ["generate", "hello", "--address", router.address]
    result = CliRunner().invoke(app, [*arguments, "--logprobs", "2"])
    assert result.stdout == "".join(WORDS) + "\n"
    lines = [line.split() for line in result.stderr.splitlines()]
    assert len(lines) == 6
    assert lines[1] == ["2", "-0.250", "|", "0", "0.000", "1", "-0.500"]
    own = CliRunner().invoke(app, [*arguments, "--logprobs", "0"])
    assert own.stderr.splitlines()[1].split() == ["2", "-0.250"]


def test_a_call_that_broke_off_is_counted_in_the_figures(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(3)])
    result = CliRunner().invoke(app, ["generate", "hello", "--address", router.address])
    assert result.stdout == "".join(WORDS) + "\n"
    assert result.stderr.endswith("wire bytes a token, broke off and went on: 1\n")


def test_an_interrupt_cancels_on_the_server_and_names_the_session(router: ScriptedRouter) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.cli", "generate", "endless", "--address", router.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(8) == "def é(x)"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "\noutrider: cancelled; session session-1\n"
    assert router.cancelled_sessions == ["session-1"]
