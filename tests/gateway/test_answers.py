"""What the gateway holds of answers is compact, bounded, and counted before the answers begin."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from outrider.client import Chunk, LogprobRows, Model, TokenLogprobs
from outrider.errors import InvalidRequest, Overloaded
from outrider.gateway import held_answers
from outrider.gateway.answer_body import PIECE_CHARACTERS, body_pieces, json_pieces
from outrider.gateway.held_answers import AHEAD_BYTES, AnswerBounds, HeldAnswers
from outrider.gateway.schema import ResponseTerms
from outrider.limits.tenant_shares import TenantShares
from outrider.store.api_keys import Keys
from outrider.v1 import inference_pb2 as pb
from tests.gateway.conftest import gateway_harness
from tests.gateway.process import gateway_process
from tests.loops import stalls
from tests.router import fakes
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, running_router

MIB = 2**20
ANSWERS, TOKENS, ALTERNATIVES = 16, 1000, 20
PER_TOKEN = 1000  # bytes, with what the connections take; objects of rows and their JSON took 13,000
ASKED: dict[str, Any] = {"model": "target", "prompt": "x", "n": ANSWERS, "max_tokens": TOKENS, "logprobs": ALTERNATIVES}


async def test_log_probabilities_are_stored_as_sent_on_the_wire_and_serialized_while_sending(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    async with (
        running_router(redis_url, max_sessions=ANSWERS) as rig,
        announced(FakeVerifier(SCRIPT, stride=8), rig.registry, MODEL.digest),
        gateway_process(rig.address) as gateway,
        httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=120) as web,
    ):
        warm = await web.post("/v1/completions", json={**ASKED, "n": 1, "max_tokens": 8})
        assert warm.status_code == 200
        held = gateway.forget_peak()
        received, first, entries = 0, b"", 0
        async with web.stream("POST", "/v1/completions", json=ASKED) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_bytes():
                first = first or piece
                received += len(piece)
                entries += piece.count(b'"finish_reason":"length"')
        taken = gateway.peak_bytes - held
        print(f"\n{ANSWERS * TOKENS} tokens, {received / MIB:.1f} MiB of JSON: {taken / MIB:.1f} MiB held")
        assert first.startswith(b'{"id":"cmpl-')
        assert entries >= ANSWERS - 1  # a piece may end in one
        assert taken < ANSWERS * TOKENS * PER_TOKEN
        assert await stalls([gateway.page]) == {gateway.page: 0}


async def test_a_complete_answer_has_the_entries_of_a_streamed_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.answer_body.PIECE_CHARACTERS", 10)
    async with gateway_harness(redis_url) as harness, httpx.AsyncClient(base_url=f"{harness.url}/v1") as web:
        asked: dict[str, Any] = {"model": "target", "prompt": "x", "max_tokens": 20, "logprobs": 3}
        whole = (await web.post("/completions", json=asked)).json()["choices"][0]
        events = (await web.post("/completions", json={**asked, "stream": True})).text.split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if "{" in event]
    columns = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    for column in ("tokens", "token_logprobs", "top_logprobs"):
        assert whole["logprobs"][column] == [entry for each in columns for entry in each[column]]
    assert {len(column) for column in whole["logprobs"].values()} == {20}
    assert whole["text"] == "".join(piece["text"] for piece in pieces)


async def test_answers_count_for_their_tenants_share_before_they_begin(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    most = 2**16  # bytes of bodies, so 128 KiB of answers for one tenant
    async with gateway_harness(
        redis_url, FakeVerifier(SCRIPT), auth="keys", gateway={"max_total_bytes": most}
    ) as harness:
        stored = Keys(harness.rig.client)
        taker, other = [(await stored.add(tenant))[0] for tenant in ("taker", "other")]
        async with httpx.AsyncClient(base_url=f"{harness.url}/v1", timeout=60) as web:

            async def post(key: str, **changes: Any) -> httpx.Response:
                asked = {"model": "target", "prompt": "x", "max_tokens": 200, "logprobs": 20, **changes}
                return await web.post("/completions", json=asked, headers={"authorization": f"Bearer {key}"})

            refused = await post(taker, n=4)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "max_tokens")
            assert error["message"].startswith("max_tokens: must be at most 70 for 4 answers with 20 log-probabilities")
            assert harness.verifier.starts == []

            harness.verifier.pace_s = 0.01
            running = asyncio.create_task(post(taker))
            while not harness.verifier.starts:
                await asyncio.sleep(0.01)
            full = await post(taker)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "bytes of answers of this tenant" in full.json()["error"]["message"]
            answer = await post(other, max_tokens=20)
            assert answer.status_code == 200, answer.text
            assert (await post(taker, max_tokens=20, logprobs=None)).status_code == 200
            assert (await running).status_code == 200
            assert (await post(taker, max_tokens=20)).status_code == 200  # what was sent counts no longer


async def test_an_answer_without_a_token_limit_counts_for_the_models_context(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    chat = {"model": "target", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    async with (
        gateway_harness(redis_url, gateway={"max_total_bytes": 2**16}) as harness,
        httpx.AsyncClient(base_url=f"{harness.url}/v1") as web,
    ):
        refused = await web.post("/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_completion_tokens")
        fits = await web.post("/chat/completions", json={**chat, "stream": True})
        assert "no chat template" in fits.text  # the router's word: the gateway has let it pass


class ScriptedModels:
    """A client whose router serves one model."""

    def __init__(self, context: int) -> None:
        self.calls = 0
        self._context = context

    async def models(self, *, timeout: float) -> list[Model]:
        self.calls += 1
        return [Model("target", self._context, 100, b"", 1, 0)]


def terms(**changes: Any) -> ResponseTerms:
    fields = {
        "model": "target",
        "n": 1,
        "stream": False,
        "include_usage": False,
        "alternatives": 20,
        "continuous_usage": False,
    }
    return ResponseTerms(**{**fields, "token_limit": 10, "names": {}, **changes})


async def test_the_context_length_is_fetched_once_and_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    total = TenantShares(2**20, "bytes of answers")
    client: Any = ScriptedModels(context=100)
    bounds = AnswerBounds(timeout_s=1)
    for limit, reserved in ((10, 10), (None, 100), (2**30, 100)):
        held = HeldAnswers(total, "one")
        await bounds.reserve(held, terms(token_limit=limit), 1, client)
        assert total.held == reserved * (held_answers.ROW_BYTES + 20 * held_answers.ALTERNATIVE_BYTES)
        held.release()
    assert client.calls == 1
    held = HeldAnswers(total, "one")
    await bounds.reserve(held, terms(alternatives=None), 128, client)
    assert total.held == 0
    await bounds.reserve(held, terms(stream=True, token_limit=None), 4, client)
    assert total.held == 4 * AHEAD_BYTES
    held.release()
    assert total.held == 0


async def test_the_tokens_of_prompts_with_log_probabilities_count_with_the_answers() -> None:
    total = TenantShares(2**20, "bytes of answers")
    client: Any = ScriptedModels(context=100)
    bounds, row = AnswerBounds(timeout_s=1), held_answers.ROW_BYTES + 20 * held_answers.ALTERNATIVE_BYTES
    scored = {"prompt_alternatives": 20, "n": 2}
    for prompts, alternatives, rows in (
        ([7, 5], None, 2 * 12),
        ([7, 5], 20, 2 * 12 + 4 * 10),
        ([None, 5], 20, 2 * 105 + 4 * 10),
        ([2**30, 5], None, 2 * 105),
    ):
        held = HeldAnswers(total, "one")
        await bounds.reserve(held, terms(alternatives=alternatives, prompt_limits=prompts, **scored), 4, client)
        assert total.held == rows * row
        held.release()
    held = HeldAnswers(TenantShares(2**15, "bytes of answers"), "one")
    with pytest.raises(InvalidRequest, match=r"prompt: .*send it in several requests"):
        await bounds.reserve(held, terms(alternatives=None, prompt_limits=[100], **scored), 2, client)
    with pytest.raises(InvalidRequest, match="max_tokens: must be at most 7 for 2 answers"):
        await bounds.reserve(held, terms(prompt_limits=[10], token_limit=90, **scored), 2, client)
    held = HeldAnswers(total, "one")
    await bounds.reserve(held, terms(stream=True, alternatives=None, prompt_limits=[9], **scored), 2, client)
    assert total.held == 2 * AHEAD_BYTES
    held.release()


def test_unreserved_bytes_count_when_they_arrive() -> None:
    total = TenantShares(1000, "bytes of answers")
    held = HeldAnswers(total, "")
    held.reserve(100)
    chunk = made_chunk("x" * 90)
    held.add(chunk)
    assert total.held == 100
    held.add(chunk)
    assert total.held == 180
    held.add(made_chunk("é" * 10))
    assert total.held == 220
    with pytest.raises(Overloaded, match="as many bytes of answers as it can"):
        held.add(made_chunk("x" * 781))
    held.release()
    assert total.held == 0


def made_chunk(text: str) -> Chunk:
    return Chunk(text, (), (), 0, 0)


def test_log_probability_rows_equal_their_entries() -> None:
    entries = [
        pb.TokenLogprobs(logprob=-0.5, top_ids=[3, 4], top_logprobs=[-0.5, -1.0], text=b"a", top_texts=[b"a", b"b"]),
        pb.TokenLogprobs(logprob=-2.0),
    ]
    rows = LogprobRows(entry.SerializeToString() for entry in entries)
    expected = (TokenLogprobs(-0.5, ((3, -0.5), (4, -1.0)), b"a", (b"a", b"b")), TokenLogprobs(-2.0, ()))
    assert rows == expected
    assert (rows[0], rows[-1], len(rows), tuple(rows[1:])) == (expected[0], expected[1], 2, expected[1:])
    assert rows != expected[:1]
    assert (hash(rows), repr(rows)) == (hash(expected), f"LogprobRows({[*expected]})")


async def test_a_body_in_pieces_is_the_json_of_its_lists() -> None:
    def value(made: Any) -> Any:
        return {"a": made([{"b": made([])}, {}, 1, "é\u2028"]), "c": [], "d": made(range(PIECE_CHARACTERS)), "e": None}

    pieces = [piece async for piece in body_pieces(value(iter))]
    assert len(pieces) > 2
    assert all(len(piece) < 2 * PIECE_CHARACTERS for piece in pieces)
    assert b"".join(pieces).decode() == "".join(json_pieces(value(list)))
    assert json.loads(b"".join(pieces)) == value(list)
