"""`outrider chat` against a scripted router, and which characters are shown as drafted."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider.cli.generation.chat import HELP
from outrider.cli.generation.drafted_text import DraftedText
from outrider.cli.main import app
from outrider.client import Chunk
from outrider.client._types import LogprobRows
from outrider.errors import Overloaded
from outrider.v1 import inference_pb2 as pb
from tests.client.conftest import WORDS, Fault, ScriptedRouter, router

__all__ = ["router"]  # the fixture

ANSWER = "".join(WORDS)


def said(router: ScriptedRouter, *lines: str, arguments: tuple[str, ...] = ()) -> str:
    typed = "".join(f"{line}\n" for line in lines)
    result = CliRunner().invoke(app, ["chat", "--address", router.address, *arguments], input=typed)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_turn_has_what_was_said_before(router: ScriptedRouter) -> None:
    shown = said(router, "one", "", "two", "/new", "three", arguments=("--system", "be brief"))
    assert shown.count(f"{ANSWER}\n5 tokens in 2 steps (2.50 a step), 1000 tokens/s, seed") == 3
    turns = [[(it.role, it.content) for it in request.messages] for request in router.requests]
    first = [("system", "be brief"), ("user", "one")]
    assert turns == [
        first,
        [*first, ("assistant", ANSWER), ("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]
    assert [request.speculation.policy for request in router.requests] == ["", "", ""]
    assert len({request.sampling.seed for request in router.requests}) == 3


def test_settings_change_by_what_is_typed(router: ScriptedRouter) -> None:
    lines = ("/seed 9", "/temperature 0", "/plain", "one", "/plain", "/seed", "/system in rhymes", "two", "/quit", "no")
    said(router, *lines)
    one, two = router.requests
    assert (one.sampling.seed, one.sampling.temperature, one.speculation.policy) == (9, 0.0, "off")
    assert (two.sampling.temperature, two.speculation.policy) == (0.0, "")
    assert two.sampling.seed != 9
    assert [(it.role, it.content) for it in two.messages] == [("system", "in rhymes"), ("user", "two")]


@pytest.mark.parametrize(
    "line", ["/", "/help", "/temperature", "/temperature -1", "/temperature nan", "/seed x", "/new x"]
)
def test_a_line_that_is_no_setting_shows_all(line: str, router: ScriptedRouter) -> None:
    assert HELP in said(router, line)
    assert not router.requests


def test_a_refused_turn_is_said_and_the_conversation_goes_on(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(0, Overloaded("all slots are taken"))] * 9)
    assert "all slots are taken" in said(router, "one", "/quit")
    router.faults = iter([])
    assert "seed: is -1" in said(router, "/seed -1", "two", "/quit")


def chunk(text: str, *tokens: bytes) -> Chunk:
    rows = LogprobRows(pb.TokenLogprobs(text=token).SerializeToString() for token in tokens)
    return Chunk(text, tuple(range(len(tokens))), (), 0, 0, rows)


def test_all_tokens_of_a_step_but_its_last_were_drafted() -> None:
    drafted = DraftedText()
    steps = [chunk("a b c", b"a", b" b", b" c"), chunk(" d", b" d"), chunk(" e f", b" e", b" f")]
    assert [[*drafted.pieces(step)] for step in steps] == [
        [("a b", True), (" c", False)],
        [(" d", False)],
        [(" e", True), (" f", False)],
    ]


def test_text_may_come_later_than_its_tokens_and_characters_in_parts() -> None:
    drafted = DraftedText()
    first, second = "é".encode()[:1], "é".encode()[1:]
    steps = [chunk("", b"x", first), chunk("xé", second, b"st", b"o"), chunk("sto", b"p"), chunk("", b"<end>")]
    assert [[*drafted.pieces(step)] for step in steps] == [
        [],
        [("xé", True)],
        [("st", True), ("o", False)],
        [],
    ]


def test_a_chunk_without_tokens_texts_is_not_drafted() -> None:
    assert [*DraftedText().pieces(chunk("abc"))] == [("abc", False)]
