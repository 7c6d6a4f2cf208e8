"""An answer accepts no commit that does not continue it, and ends where its text ends."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.core.sampling.logprobs import stride
from outrider.core.session.contract import Contract, StepReport
from outrider.core.session.decoding import PromptScores, ReceivedCommit
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import InternalError
from outrider.limits.fair_turns import LoopTurns
from router.counters.usage_stats import UsageStats
from router.sessions.response import REPLAY_TOKENS, Response
from router.text.detokenizer import AnswerText, Detokenizer

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[3] / "models" / "target" / "tokenizer.json"))
PROMPT = tuple(TOKENIZER.encode("x = ").ids)
ANSWER = tuple(TOKENIZER.encode("[1, 2, 3]\n").ids)


def _answer(*stops: str) -> Response:
    text = AnswerText(Detokenizer(TOKENIZER, PROMPT), stops)
    return Response(PROMPT, Contract(seed=1, max_tokens=99), text, UsageStats())


def _commit(tokens: tuple[int, ...] = ANSWER) -> ReceivedCommit:
    return ReceivedCommit(
        epoch=1,
        position=len(PROMPT),
        tokens=tokens,
        gaps=tuple(float(index) for index in range(len(tokens))),
        logprobs=b"",
        digest=extend(EMPTY, PROMPT + tokens),
        report=StepReport(verified=3, accepted=1, verified_depth=2, wire_bytes=9),
    )


@pytest.mark.parametrize(
    "commit",
    [replace(_commit(), position=len(PROMPT) + 1), replace(_commit(), digest=1), replace(_commit(), position=0)],
)
def test_a_commit_that_does_not_continue_the_answer_is_refused(commit: ReceivedCommit) -> None:
    with pytest.raises(InternalError):
        _answer().add_commit(commit)


def test_tokens_after_the_stop_string_are_dropped() -> None:
    answer = _answer(", 2")
    part = answer.add_commit(_commit())
    assert (part.text, part.text_offset, answer.stopped) == ("[1", 2, True)
    assert part.tokens == ANSWER[: len(part.tokens)]
    assert len(part.gaps) == len(part.tokens) < len(ANSWER)
    assert answer.position == len(PROMPT) + len(part.tokens)
    assert answer.digest == extend(EMPTY, PROMPT + part.tokens)
    assert answer.usage.completion_tokens == len(part.tokens)


def test_figures_count_steps_by_depth() -> None:
    usage = UsageStats()
    for verified_depth, accepted in ((0, 0), (3, 1), (2, 2)):
        report = StepReport(verified=verified_depth, accepted=accepted, verified_depth=verified_depth, wire_bytes=5)
        usage.observe(report, accepted + 1)
    assert usage.tried_by_depth == [2, 2, 1]
    assert usage.reached_by_depth == [2, 1, 0]
    assert (usage.steps, usage.verified, usage.accepted) == (3, 5, 3)
    assert (usage.completion_tokens, usage.wire_bytes) == (6, 15)


async def test_log_probabilities_of_a_long_answer_are_replayed_with_their_tokens() -> None:
    contract, size = Contract(seed=1, max_tokens=999, logprobs=1), stride(1)
    answer = Response(PROMPT, contract, AnswerText(Detokenizer(TOKENIZER, PROMPT), ()), UsageStats())
    tokens = ANSWER * (2 * REPLAY_TOKENS // len(ANSWER) + 1)
    kept = [bytes([place % 256]) * size for place in range(len(tokens))]
    parts = await answer.replay(tokens, b"".join(kept), LoopTurns(), "one")
    assert len(parts) == 3
    for part in parts:
        first = part.position - len(PROMPT)
        assert part.logprobs == b"".join(kept[first : first + len(part.tokens)])


async def test_long_answers_are_replayed_in_small_parts_and_in_turns() -> None:
    order: list[str] = []

    class Turns(LoopTurns):
        async def run(self, tenant: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
            part = await super().run(tenant, work, *args, **options)
            order.append(tenant)
            assert len(part.tokens) <= REPLAY_TOKENS
            return part

    ticks = itertools.count()
    turns, tokens = Turns(lambda: float(next(ticks))), ANSWER * REPLAY_TOKENS
    await asyncio.gather(*(_answer().replay(tokens, b"", turns, tenant) for tenant in ("one", "two")))
    assert len(order) == 2 * len(ANSWER)
    assert max(len([*run]) for _, run in itertools.groupby(order[: len(ANSWER)])) <= 2


def _scored() -> Response:
    text = AnswerText(Detokenizer(TOKENIZER, PROMPT), ())
    return Response(PROMPT, Contract(seed=1, max_tokens=9, prompt_logprobs=1), text, UsageStats())


def test_a_prompts_log_probabilities_come_in_small_parts_before_the_answer() -> None:
    prompt = tuple(range(1, 200))
    answer = Response(
        prompt,
        Contract(seed=1, max_tokens=9, prompt_logprobs=1),
        AnswerText(Detokenizer(TOKENIZER, PROMPT), ()),
        UsageStats(),
    )
    first = answer.first_token(prompt)
    assert (first.position, first.tokens, first.ranks, len(first.logprobs)) == (0, (1,), (0,), stride(1))
    rows = [bytes([index]) * stride(1) for index in range(1, 199)]
    parts = answer.add_scores(PromptScores(1, b"".join(rows), tuple(range(1, 199))), prompt)
    assert max(len(part.tokens) for part in parts) == REPLAY_TOKENS
    assert tuple(token for part in parts for token in part.tokens) == prompt[1:]
    assert b"".join(part.logprobs for part in parts) == b"".join(rows)
    assert [part.position for part in parts] == [*range(1, 199, REPLAY_TOKENS)]
    assert not answer.scoring


@pytest.mark.parametrize(
    "scores",
    [
        PromptScores(2, bytes(stride(1)), (1,)),
        PromptScores(1, bytes(stride(1) - 1), (1,)),
        PromptScores(1, bytes(stride(0)), (1,)),
        PromptScores(1, bytes(stride(1) * len(PROMPT)), (1,) * len(PROMPT)),
    ],
)
def test_log_probabilities_that_do_not_continue_the_prompts_are_refused(scores: PromptScores) -> None:
    answer = _scored()
    answer.first_token(PROMPT)
    with pytest.raises(InternalError, match="of the prompt"):
        answer.add_scores(scores, PROMPT)


def test_a_commit_before_the_prompts_log_probabilities_is_refused() -> None:
    with pytest.raises(InternalError, match="before it sent the prompt's log-probabilities"):
        _scored().add_commit(_commit())
