"""`outrider generate` against a scripted router."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from tests.client.conftest import WORDS, ScriptedRouter, router

__all__ = ["router"]  # the fixture


def test_text_goes_to_stdout_and_figures_to_stderr(router: ScriptedRouter) -> None:
    arguments = ["generate", "hello", "--address", router.address, "--seed", "4", "--stop", "a", "--stop", "b"]
    result = CliRunner().invoke(app, [*arguments, "--speculation", "off", "--temperature", "0"])
    assert result.exit_code == 0
    assert result.stdout == "".join(WORDS) + "\n"
    assert result.stderr == (
        "outrider: 5 tokens, ended by length, seed 4, 1000.0 tok/s after a first token in 1 ms, "
        "acceptance length 2.50 over 2 steps, 15 wire bytes a token\n"
    )
    sampling = router.requests[0].sampling
    assert (list(sampling.stop), sampling.temperature) == (["a", "b"], 0.0)
    assert router.requests[0].speculation.policy == "off"


def test_the_prompt_may_come_from_stdin(router: ScriptedRouter) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--address", router.address], input="from\nstdin")
    assert result.exit_code == 0
    assert router.requests[0].text == "from\nstdin"


@pytest.mark.parametrize(("prompt", "message"), [("refused", "prompt: is refused"), ("overloaded", "all slots")])
def test_a_refusal_is_a_message_and_status_2(router: ScriptedRouter, prompt: str, message: str) -> None:
    result = CliRunner().invoke(app, ["generate", prompt, "--address", router.address])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"outrider: {message}")


def test_a_bug_of_the_server_is_status_1(router: ScriptedRouter) -> None:
    result = CliRunner().invoke(app, ["generate", "cut", "--address", router.address])
    assert result.exit_code == 1
    assert "without a result" in result.stderr
