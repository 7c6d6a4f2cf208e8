"""Turns, forks and hand-over through real processes: the same text as without them, and the KV still warm."""

import asyncio

import pytest
from tokenizers import Tokenizer

import outrider
from outrider.errors import Busy, NotFound, Superseded
from outrider.fleet.cluster import LocalCluster
from tests.e2e.mini_router import described

pytestmark = pytest.mark.asyncio(loop_scope="session")

FURTHER = "\n\ndef main():\n"


async def test_a_turn_finds_its_kv_and_is_answered_as_in_a_session_of_its_own(
    cluster: LocalCluster, prompts: list[str], tokenizer: Tokenizer
) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        for policy in ("off", "ema"):
            session = (await client.create_session()).session_id
            first = await client.generate(
                prompts[0], session=session, temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, timeout=60
            )
            second = await client.generate(
                FURTHER,
                session=session,
                temperature=0.8,
                seed=6,
                max_tokens=40,
                ignore_eos=True,
                timeout=60,
                speculation=policy,
            )
            history = tokenizer.encode(prompts[0]).ids + list(first.token_ids)
            assert second.cached_tokens >= len(history) - 1
            assert (second.session_id, second.generation) == (session, 2)
            whole = history + tokenizer.encode(FURTHER, add_special_tokens=False).ids
            alone = await client.generate(whole, temperature=0.8, seed=6, max_tokens=40, ignore_eos=True, timeout=60)
            assert second.token_ids == alone.token_ids
            assert second.text == alone.text
            await client.close_session(session)


async def test_a_differing_history_forks_at_the_common_prefix_and_keeps_the_session(
    cluster: LocalCluster, prompts: list[str]
) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        first = await client.generate(prompts[1], temperature=0, max_tokens=30, ignore_eos=True, timeout=60)
        other = prompts[1] + "\nimport os\n"
        options = {"temperature": 0.7, "seed": 3, "max_tokens": 30, "ignore_eos": True, "timeout": 60}
        fork = await client.generate(other, session=first.session_id, whole_history=True, **options)  # type: ignore[arg-type]
        assert (fork.forked_from, fork.generation) == (first.session_id, 1)
        assert fork.cached_tokens > 8
        alone = await client.generate(other, **options)  # type: ignore[arg-type]
        assert fork.token_ids == alone.token_ids
        session = await client.get_session(first.session_id)
        assert (session.length, session.generation) == (first.usage.prompt_tokens + 30, 1)


async def test_another_client_continues_where_the_first_stopped_reading(
    cluster: LocalCluster, prompts: list[str]
) -> None:
    options = {"temperature": 0.9, "seed": 11, "max_tokens": 400, "ignore_eos": True, "timeout": 60}
    async with outrider.AsyncClient(cluster.router_address) as client:
        whole = await client.generate(prompts[2], **options)  # type: ignore[arg-type]
        async with outrider.AsyncClient(cluster.router_address) as other:
            stream = client.stream(prompts[2], **options)  # type: ignore[arg-type]
            text, last = "", None
            chunks = aiter(stream)
            for _ in range(5):
                last = await anext(chunks)
                text += last.text
            assert last is not None
            rest = other.resume(
                stream.session_id, next_position=last.next_position, text_offset=last.text_offset, timeout=60
            )
            taken = asyncio.create_task(_texts(rest))
            with pytest.raises(Superseded):
                async for _ in chunks:
                    pass
            assert text + await taken == whole.text
            again = await _texts(other.resume(stream.session_id, timeout=60))
            assert again == whole.text


async def _texts(stream: outrider.AsyncStream) -> str:
    return "".join([chunk.text async for chunk in stream])


async def test_a_session_has_one_generation_at_a_time_and_any_client_may_cancel_it(
    cluster: LocalCluster, prompts: list[str]
) -> None:
    verifier = cluster.processes["verifier-0"].address
    async with (
        outrider.AsyncClient(cluster.router_address) as client,
        outrider.AsyncClient(cluster.router_address) as other,
    ):
        stream = client.stream(prompts[0], max_tokens=600, ignore_eos=True, timeout=60)
        chunks = aiter(stream)
        await anext(chunks)
        with pytest.raises(Busy):
            await other.generate("x", session=stream.session_id, max_tokens=1, timeout=10)
        await other.cancel(stream.session_id)
        async for _ in chunks:
            pass
        assert stream.result.finish_reason == "cancelled"
        async with asyncio.timeout(5):
            while (await described(verifier)).sessions:
                await asyncio.sleep(0.02)
        with pytest.raises(NotFound):
            await other.cancel("nobody")


async def test_log_probabilities_do_not_depend_on_speculation(cluster: LocalCluster, prompts: list[str]) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        plain, speculative = [
            await client.generate(
                prompts[0], temperature=0.6, seed=1, max_tokens=40, logprobs=2, speculation=policy, timeout=60
            )
            for policy in ("off", "ema")
        ]
    assert plain.token_ids == speculative.token_ids
    assert len(plain.logprobs) == len(plain.token_ids)
    for one, two in zip(plain.logprobs, speculative.logprobs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
        assert [token for token, _ in one.top][:1] == [token for token, _ in two.top][:1]
        assert one.logprob <= one.top[0][1] + 1e-6
