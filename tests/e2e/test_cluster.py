"""Through the SDK, router, Redis, verifier and drafters: the same text however it is made."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import outrider
from outrider.errors import InvalidRequest, NotFound
from outrider.fleet.cluster import LocalCluster
from tests.e2e.mini_router import described

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("policy", ["off", "fixed", "rounds", "heuristic", "ema", "goodput"])
async def test_greedy_text_is_that_of_transformers_under_every_policy(
    cluster: LocalCluster, prompts: list[str], reference: list[int], tokenizer: Tokenizer, policy: str
) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        verified = 0
        for _ in range(1 if policy == "off" else 20):  # bites: each is compared; the drafter may come too late
            result = await client.generate(
                prompts[0], temperature=0, max_tokens=256, ignore_eos=True, speculation=policy, timeout=60
            )
            assert list(result.token_ids) == reference
            assert result.text == tokenizer.decode(reference)
            assert result.usage.completion_tokens == 256
            assert result.usage.steps == 256 - result.usage.accepted
            verified += result.usage.verified
            if verified:
                break
    assert (verified > 0) == (policy != "off")


async def test_rounds_verify_chains_of_just_that_depth(cluster: LocalCluster, prompts: list[str]) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        result = await client.generate(
            prompts[1],
            temperature=0.8,
            seed=3,
            max_tokens=128,
            ignore_eos=True,
            speculation="rounds",
            depth=4,
            timeout=60,
        )
    usage = result.usage
    assert len(usage.tried_by_depth) == 4
    # A chain that is too unlikely to be worth drafting is shorter; a drafter that is late has none.
    assert usage.tried_by_depth[3] >= 0.8 * usage.tried_by_depth[0] > 0
    assert usage.verified <= 4 * (usage.steps - 1)


async def test_streamed_text_of_concurrent_seeded_sessions_is_that_of_each_alone(
    cluster: LocalCluster, prompts: list[str]
) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:

        async def ask(number: int, policy: str) -> str:
            stream = client.stream(
                prompts[number % 3], temperature=0.8, seed=number, max_tokens=64, speculation=policy, timeout=60
            )
            return "".join([chunk.text async for chunk in stream])

        alone = [await ask(number, "off") for number in range(6)]
        together = await asyncio.gather(*(ask(number, "ema") for number in range(6)))
    assert together == alone


async def test_a_stop_string_ends_the_text_before_it(
    cluster: LocalCluster, prompts: list[str], reference: list[int], tokenizer: Tokenizer
) -> None:
    text = tokenizer.decode(reference)
    stop = text[40:47]
    async with outrider.AsyncClient(cluster.router_address) as client:
        result = await client.generate(prompts[0], temperature=0, max_tokens=256, stop=[stop], timeout=60)
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"


async def test_a_cancelled_stream_leaves_nothing_behind(cluster: LocalCluster, prompts: list[str]) -> None:
    verifier = cluster.processes["verifier-0"].address
    async with outrider.AsyncClient(cluster.router_address) as client:
        for _ in range(5):
            stream = client.stream(prompts[1], temperature=0, max_tokens=500, ignore_eos=True, timeout=60)
            async for _chunk in stream:
                break
            await stream.cancel()
    async with asyncio.timeout(5):
        while (left := await described(verifier)).sessions:
            await asyncio.sleep(0.02)
    assert left.sessions == 0


async def test_wrong_requests_name_the_field(cluster: LocalCluster) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        with pytest.raises(NotFound, match="target"):
            await client.generate("x", model="gpt", timeout=10)
        for changes, field in (
            ({"max_tokens": 5000}, "max_tokens"),
            ({"temperature": -1.0}, "temperature"),
            ({"top_p": 0.0}, "top_p"),
            ({"speculation": "magic"}, "speculation"),
        ):
            with pytest.raises(InvalidRequest, match=field):
                await client.generate("x", timeout=10, **changes)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="prompt"):
            await client.generate("", timeout=10)
        with pytest.raises(InvalidRequest, match="4095"):
            await client.generate([1, 4096], timeout=10)


async def test_no_server_has_torch_in_memory(cluster: LocalCluster) -> None:
    """Models of the Llama family on CPUs need none of it. The first server of all was used by the tests before."""
    roles = {"router", "verifier", "drafter"}
    for name, process in cluster.processes.items():
        roles.discard(name.partition("-")[0])
        mapped = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
        assert "_native.abi3.so" in mapped or name.startswith("router")
        assert "libtorch" not in mapped, name
    assert not roles
