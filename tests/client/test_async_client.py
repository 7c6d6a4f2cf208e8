"""What the asyncio client promises, against a scripted router."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

import outrider
from outrider import errors
from tests.client.conftest import WORDS, ScriptedRouter

TEXT = "".join(WORDS)


async def test_generate_returns_text_tokens_gaps_seed_and_figures(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        result = await client.generate("hello", seed=7, timeout=5)
    assert result.text == TEXT
    assert result.token_ids == (1, 2, 3, 4, 5)
    assert result.gaps == (0.25, 0.5, 0.75, 1.0, 1.25)
    assert (result.seed, result.model, result.session_id) == (7, "toy", "session-1")
    assert result.finish_reason is outrider.FinishReason.LENGTH
    assert result.finish_reason == "length"
    usage = result.usage
    assert usage.acceptance_length == 2.5
    assert usage.acceptance_by_depth == (1.0, 0.5)
    assert usage.tokens_per_second == pytest.approx(4 / 0.004)
    assert (usage.wire_bytes, usage.total_s, usage.first_token_s) == (77, 0.005, 0.001)


async def test_the_seed_that_the_router_drew_is_returned(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        assert (await client.generate("hello")).seed == 99
    assert not router.requests[0].sampling.HasField("seed")


async def test_a_stream_gives_chunks_and_then_the_result(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        stream = client.stream("hello")
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.result
        chunks = [chunk async for chunk in stream]
        assert [chunk.text for chunk in chunks] == WORDS
        assert [chunk.next_position for chunk in chunks] == [3, 4, 5, 6, 7]
        assert chunks[-1].text_offset == len(TEXT)
        assert stream.result.text == TEXT
        with pytest.raises(RuntimeError, match="only once"):
            async for _ in stream:
                pass
    assert router.cancelled_sessions == []


async def test_messages_replace_a_prompt(router: ScriptedRouter) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"content": "é?", "role": "user"}]
    async with outrider.AsyncClient(router.address) as client:
        assert (await client.generate(messages=messages)).text == TEXT
        assert len(await client.samples(None, 2, messages=messages)) == 2
    for request in router.requests:
        assert request.WhichOneof("prompt") is None
        assert [(message.role, message.content) for message in request.messages] == [
            ("system", "Be brief."),
            ("user", "é?"),
        ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user"}, r'messages\[1\]: must be \{"role": "...", "content": "..."\}'),
        ({"role": "user", "content": "x", "name": "y"}, r"messages\[1\]: must be"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]: must be"),
        ("user", r"messages\[1\]: must be"),
        (7, r"messages\[1\]: must be"),
        ({"role": "user", "content": "\ud800"}, r"messages\[1\]\.content: is not valid Unicode"),
    ],
)
async def test_a_malformed_message_is_named(router: ScriptedRouter, message: object, problem: str) -> None:
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.InvalidRequest, match=problem):
            await client.generate(messages=[{"role": "user", "content": "x"}, message])  # type: ignore[list-item]
    assert router.requests == []


def nested(levels: int) -> Any:
    inner: Any = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize("levels", [64, 100_000])
@pytest.mark.parametrize("field", ["schema", "tools", "template_variables"])
async def test_json_that_is_too_deep_is_refused_by_name(router: ScriptedRouter, field: str, levels: int) -> None:
    value = [nested(levels)] if field == "tools" else nested(levels)
    options: Any = {"messages": [{"role": "user", "content": "x"}], field: value}
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.InvalidRequest) as raised:
            await client.generate(**options)
    assert raised.value.field == field
    assert router.requests == []


async def test_every_option_reaches_the_router(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        await client.generate(
            [5, 6],
            model="toy",
            temperature=0.0,
            top_k=3,
            top_p=0.5,
            seed=0,
            choice=4,
            max_tokens=9,
            stop="x",
            ignore_eos=True,
            speculation="fixed",
            depth=2,
            tokenizer_digest=b"d",
            logprobs=0,
            session="s",
            whole_history=True,
            idempotency_key="k",
        )
    request = router.requests[0]
    assert list(request.token_ids.ids) == [5, 6]
    assert request.token_ids.tokenizer_digest == b"d"
    assert request.model == "toy"
    sampling = request.sampling
    assert sampling.HasField("seed")
    assert (sampling.seed, sampling.choice, sampling.max_tokens) == (0, 4, 9)
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 3, 0.5)
    assert (list(sampling.stop), sampling.ignore_eos) == (["x"], True)
    assert (request.speculation.policy, request.speculation.depth) == ("fixed", 2)
    assert sampling.HasField("logprobs")
    assert sampling.logprobs == 0
    assert (request.session_id, request.whole_history, request.idempotency_key) == ("s", True, "k")


async def test_models_are_listed(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        assert await client.models(timeout=5) == [outrider.Model("toy", 64, 9, b"d", verifiers=1, drafters=2)]


async def test_errors_are_typed(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address, retries=0) as client:
        with pytest.raises(errors.InvalidRequest) as invalid:
            await client.generate("refused")
        assert (invalid.value.field, str(invalid.value)) == ("prompt", "prompt: is refused")
        with pytest.raises(errors.Overloaded) as overloaded:
            await client.generate("overloaded")
        assert overloaded.value.retry_after == 0.5
        with pytest.raises(errors.NotFound, match="no models any more"):
            await client.models()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": -1.0}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -1}),
        ("seed", {"seed": 2**64}),
        ("choice", {"choice": 2**32}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 2**32}),
        ("depth", {"depth": 0}),
        ("timeout", {"timeout": 0}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [2**32]}),
        ("prompt", {"prompt": "\ud800"}),
        ("stop", {"stop": ["\ud800"]}),
        ("model", {"model": "\ud800"}),
        ("session", {"session": "\ud800"}),
        ("idempotency_key", {"idempotency_key": "\ud800"}),
        ("logprobs", {"logprobs": 21}),
    ],
)
async def test_absurd_options_are_refused_by_name_before_anything_is_sent(
    router: ScriptedRouter, field: str, options: dict[str, object]
) -> None:
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.InvalidRequest) as caught:
            await client.generate(**{"prompt": "hello", **options})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert router.requests == []


async def test_an_unknown_option_is_a_type_error(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(TypeError, match="top_q"):
            client.stream("hello", top_q=1)  # type: ignore[call-arg]


async def reading(stream: outrider.AsyncStream) -> asyncio.Task[None]:
    """A task that reads a stream, once it has read the beginning, and with it the session."""
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            begun.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 5)
    return task


async def test_a_timeout_raises_deadline_exceeded_and_ends_the_call_on_the_server(
    router: ScriptedRouter,
) -> None:
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("slow", timeout=0.3)
        assert await asyncio.to_thread(router.broken.wait, 5)


async def test_leaving_the_loop_early_cancels_on_the_server(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        async for _ in client.stream("endless"):
            break
        assert await asyncio.to_thread(router.cancel_came.wait, 5)
        assert await asyncio.to_thread(router.broken.wait, 5)
    assert router.cancelled_sessions == ["session-1"]


async def test_leaving_a_with_block_cancels_on_the_server_before_it_returns(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        async with client.stream("endless") as stream:
            chunks = aiter(stream)
            await anext(chunks)
        assert router.cancelled_sessions == ["session-1"]


async def test_cancel_from_another_task_ends_the_reader_with_cancelled(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        stream = client.stream("endless")
        reader = await reading(stream)
        await stream.cancel()
        with pytest.raises(errors.Cancelled):
            await asyncio.wait_for(reader, 5)
        assert router.cancelled_sessions == ["session-1"]


async def test_a_stream_cancelled_before_its_first_read_sends_no_request(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        stream = client.stream("hello", session="s")
        await stream.cancel()
        with pytest.raises(errors.Cancelled):
            async for _ in stream:
                pass
    assert (router.requests, router.cancelled_sessions) == ([], [])


async def test_a_task_that_waits_for_the_end_can_be_cancelled_and_the_server_receives_the_cancel(
    router: ScriptedRouter,
) -> None:
    async with outrider.AsyncClient(router.address) as client:
        task = await reading(client.stream("endless"))
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancel_came.wait, 5)
    assert router.cancelled_sessions == ["session-1"]


async def test_a_cancelled_task_stays_cancelled_and_the_server_receives_the_cancel(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        task = await reading(client.stream("endless"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.cancelled_sessions == ["session-1"]


@pytest.mark.parametrize("timeout", [None, 5])
async def test_an_address_without_a_server_is_unavailable_at_once(timeout: float | None) -> None:
    begin = time.monotonic()
    async with outrider.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
            await client.generate("hello", timeout=timeout)
    assert time.monotonic() - begin < 2


async def test_a_silent_address_is_unavailable_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        begin = time.monotonic()
        async with outrider.AsyncClient(address) as client:
            with pytest.raises(errors.Unavailable, match=address):
                await client.generate("hello", timeout=0.5)
        assert time.monotonic() - begin < 2


@pytest.mark.parametrize("address", ["", "localhost", ":7070", "host:"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigError, match="HOST:PORT"):
        outrider.AsyncClient(address)


async def test_a_request_without_an_idempotency_key_gets_its_own(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        first, second = [await client.generate("hello", timeout=5) for _ in range(2)]
        assert first.session_id != second.session_id
        one, same = [await client.generate("hello", idempotency_key="mine", timeout=5) for _ in range(2)]
    assert one.session_id == same.session_id
    assert (one.text, one.token_ids) == (same.text, same.token_ids)
    keys = [request.idempotency_key for request in router.requests]
    assert len(set(keys)) == 3
    assert keys[2:] == ["mine", "mine"]


async def test_each_token_has_one_log_probability_entry(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        assert (await client.generate("hello", timeout=5)).logprobs == ()
        own = await client.generate("hello", logprobs=0, timeout=5)
        assert own.logprobs == tuple(
            outrider.TokenLogprobs(-number / 4, (), id=token) for number, token in enumerate(own.token_ids)
        )
        likely = await client.generate("hello", logprobs=2, timeout=5)
        assert [entry.top for entry in likely.logprobs] == [((0, 0.0), (1, -0.5))] * 5


async def test_a_closed_client_refuses_calls(router: ScriptedRouter) -> None:
    client = outrider.AsyncClient(router.address)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.generate("hello")


async def test_closing_the_client_ends_a_stream_that_is_half_read_on_the_server_too(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        chunks = aiter(client.stream("endless"))
        await anext(chunks)
    assert router.cancelled_sessions == ["session-1"]
    assert await asyncio.to_thread(router.broken.wait, 5)
    with pytest.raises(errors.Cancelled, match="the client was closed"):
        async for _ in chunks:
            pass


async def test_closing_the_client_ends_a_call_that_waits(router: ScriptedRouter) -> None:
    client = outrider.AsyncClient(router.address)
    waiting = asyncio.create_task(client.generate("mute"))
    assert await asyncio.to_thread(router.under_way.wait, 5)
    await client.close()
    with pytest.raises(errors.Cancelled, match="the client was closed"):
        await asyncio.wait_for(waiting, 5)
    assert await asyncio.to_thread(router.broken.wait, 5)


async def test_a_turn_that_is_cancelled_before_it_started_is_cancelled_on_the_server_too(
    router: ScriptedRouter,
) -> None:
    async with outrider.AsyncClient(router.address) as client:
        waiting = asyncio.create_task(client.generate("mute", session="known"))
        assert await asyncio.to_thread(router.under_way.wait, 5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert router.cancelled_sessions == ["known"]
