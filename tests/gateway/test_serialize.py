"""What drafts brought, in the form that vLLM gives, and calls of tools in OpenAI's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.client import TokenLogprobs
from outrider.core.answers.answer_reader import AnswerReader, AnswerTerms, ModelForm
from outrider.gateway import serialize
from outrider.gateway.schema import Completion
from outrider.gateway.serialize import ChatForm, CompletionForm, StreamedText

ASKED = Completion(model="m", prompt="x", logprobs=1).terms


def used(prompt: int, cached: int, completion: int, accepted: int) -> Any:
    status = SimpleNamespace(drafting=True, reason="drafting", explanation="")
    usage = SimpleNamespace(
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=completion - 1,
        accepted=accepted,
        verified=accepted + 1,
        speculation=status,
    )
    return SimpleNamespace(usage=usage, cached_tokens=cached)


def test_prompts_count_once_with_what_was_cached_of_them_and_no_more_drafts_than_the_answer_has() -> None:
    usage = serialize.cost([used(9, 8, 3, 5), used(9, 2, 3, 1), used(7, 6, 2, 0), used(7, 7, 2, 2)], 2)
    assert usage["prompt_tokens"] == 16
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    details = usage["completion_tokens_details"]
    assert details == {"reasoning_tokens": 6, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6}


def generation(tried: tuple[int, ...], reached: tuple[int, ...], verified: int) -> Any:
    return SimpleNamespace(
        usage=SimpleNamespace(tried_by_depth=tried, reached_by_depth=reached, verified=verified, accepted=sum(reached))
    )


def test_steps_are_counted_by_accepted_tokens_over_all_choices() -> None:
    several = [generation((10, 8, 3), (6, 2), 40), generation((5,), (), 5), generation((), (), 0)]
    figures = serialize.speculation(several)["metrics"]["speculative_decoding"]
    assert figures == {
        "mean_acceptance_length": 1 + 8 / 15,
        "draft_acceptance_rate": 8 / 45,
        "acceptance_histogram": [9, 4, 2],
        "num_spec_steps": 15,
        "num_draft_tokens": 45,
        "num_accepted_draft_tokens": 8,
        "num_spec_tokens": 3,
    }
    assert sum(figures["acceptance_histogram"]) == 15
    assert sum(accepted * steps for accepted, steps in enumerate(figures["acceptance_histogram"])) == 8


def test_an_answer_without_verified_drafts_has_no_metrics() -> None:
    assert serialize.speculation([generation((), (), 0)]) == {}
    assert serialize.speculation([generation((0,), (0,), 0)]) == {}


CALL = '{"name": "time", "arguments": {"zone": 1}}'
NAMED = "[TOOL_CALLS]time[CALL_ID]abcdefgh1[ARGS]{}"


def streamed(form: str, text: str, reason: str) -> tuple[str, list[Any], str]:
    """The content, the calls and the reason of a streamed choice."""
    made = AnswerReader(ModelForm(form), AnswerTerms(("time",)))
    chat = ChatForm(ASKED)
    choices = [*chat.parts(StreamedText(0, text, None, 0, lambda: made)), *chat.last(0, reason)]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert deltas[0] == {"role": "assistant", "content": None if calls else ""}
    return "".join(delta.get("content") or "" for delta in deltas), calls, choices[-1]["finish_reason"]


@pytest.mark.parametrize(
    ("form", "text", "reason", "ended", "begun"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>", "stop", "tool_calls", 1),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{CALL[:-4]}", "length", "length", 2),
        ("hermes", f"<tool_call>{CALL[:-4]}", "stop", "stop", 1),
        ("hermes", "<tool_call>" + CALL.replace("1", "x") + "</tool_call>", "stop", "stop", 1),
        ("hermes", "none", "stop", "stop", 0),
    ],
)
def test_a_streamed_answer_ends_for_its_calls_only_if_all_are_whole(
    form: str, text: str, reason: str, ended: str, begun: int
) -> None:
    content, calls, why = streamed(form, text, reason)
    assert content == ("none" if not begun else "")
    assert len([call for call in calls if "id" in call]) == begun
    assert why == ended


def test_ids_of_calls_are_the_models_own_or_of_the_length_that_its_template_takes() -> None:
    _, (given, *_), _ = streamed("mistral11", NAMED, "stop")
    assert given["id"] == "abcdefgh1"
    _, (new, *_), _ = streamed("mistral", f"[TOOL_CALLS][{CALL}]", "stop")
    assert len(new["id"]) == 9
    assert new["id"].isalnum()
    _, (long, *_), _ = streamed("hermes", f"<tool_call>{CALL}</tool_call>", "stop")
    assert long["id"].startswith("call_")


TOKENS = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b\xc3", b"\xa9", b"c"]  # a, an emoji, b, e with an accent, c


@pytest.mark.parametrize("pieces", [(7,), (1, 6), (2, 1, 4), (3, 4), (5, 2), (1,) * 7])
def test_offsets_of_tokens_are_those_in_the_text_however_a_stream_is_divided(pieces: tuple[int, ...]) -> None:
    entries = [TokenLogprobs(-1.0, ((1, -0.5),), text, (b"x",)) for text in TOKENS]
    form, sent, found, first = CompletionForm(ASKED), "", list[int](), 0
    for count in pieces:
        whole = b"".join(TOKENS[: first + count]).decode(errors="ignore")
        part = StreamedText(0, whole[len(sent) :], entries[first : first + count], len(sent), AnswerReader)
        (choice,) = form.parts(part)
        found += choice["logprobs"]["text_offset"]
        sent, first = whole, first + count
    assert found == [0, 1, 1, 1, 2, 3, 4]
    assert sent == "a\U0001f600b\u00e9c"


def test_the_chosen_token_is_among_the_likeliest_ones() -> None:
    (choice,) = CompletionForm(ASKED).parts(
        StreamedText(0, "a", [TokenLogprobs(-3.0, ((1, -0.5),), b"a", (b"x",))], 0, AnswerReader)
    )
    assert [*choice["logprobs"]["top_logprobs"]] == [{"x": -0.5, "a": -3.0}]


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_choice_without_text_has_its_role(pieces: int) -> None:
    chat, piece = ChatForm(ASKED), StreamedText(0, "", None, 0, AnswerReader)
    events = [*(event for _ in range(pieces) for event in chat.parts(piece)), *chat.last(0, "stop")]
    assert [event["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]
