"""A bad network between each pair of parts, through real processes: the text is the same, nothing lost or repeated."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import RedisError

import outrider
from bench.faults import FaultProxy
from outrider.config import ClusterConfig, DrafterConfig, RedisConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import OFF, Contract
from outrider.fleet.cluster import LocalCluster
from outrider.store.redis.embedded import find_server
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import SPECULATE, Answer, decode, trust

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 250


@dataclass
class Faulty:
    """A cluster whose parts reach each other through proxies alone."""

    cluster: LocalCluster
    proxies: dict[str, FaultProxy]  # "client": to the router; the others: to that part

    async def text(self, prompt: str, **options: object) -> outrider.Generation:
        async with outrider.AsyncClient(self.proxies["client"].address) as client:
            return await client.generate(
                prompt,
                temperature=0.8,
                max_tokens=TOKENS,
                ignore_eos=True,
                timeout=100,
                **options,  # type: ignore[arg-type]
            )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def faulty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Faulty]:
    ports = {name: free_port() for name in ("redis", "verifier", "drafter", "client")}
    async with AsyncExitStack() as stack:
        proxies = {
            name: await stack.enter_async_context(FaultProxy(f"127.0.0.1:{port}", seed=port))
            for name, port in ports.items()
        }
        server = await asyncio.create_subprocess_exec(
            *(str(find_server()), "--port", str(ports["redis"]), "--save", "", "--bind", "127.0.0.1"),
            cwd=tmp_path_factory.mktemp("redis"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        stack.push_async_callback(server.wait)
        stack.callback(server.terminate)
        config = ClusterConfig(
            redis=RedisConfig(url=f"redis://{proxies['redis'].address}"),
            router=RouterConfig(
                listen=f"127.0.0.1:{ports['client']}", models={"target": MODELS / "target"}, lease_s=4.0, overlap=True
            ),
            verifier=[
                VerifierConfig(
                    model=MODELS / "target",
                    dtype="float32",
                    listen=f"127.0.0.1:{ports['verifier']}",
                    advertise=proxies["verifier"].address,
                )
            ],
            drafter=[
                DrafterConfig(
                    model=MODELS / "drafter",
                    dtype="float32",
                    listen=f"127.0.0.1:{ports['drafter']}",
                    advertise=proxies["drafter"].address,
                )
            ],
        )
        async with Redis.from_url(f"redis://{proxies['redis'].address}") as client:
            async with asyncio.timeout(10):
                while True:
                    try:
                        await client.ping()
                        break
                    except (OSError, RedisError):
                        await asyncio.sleep(0.05)
        cluster = LocalCluster(config, forward=lambda name, line: print(name, line))
        yield Faulty(await stack.enter_async_context(cluster), proxies)
        for proxy in proxies.values():
            proxy.thaw()
            proxy.accept()


async def slow(proxy: FaultProxy, rng: random.Random) -> None:
    """Delay and jitter that change."""
    proxy.delay_s, proxy.jitter_s = rng.uniform(0, 0.01), rng.uniform(0, 0.02)
    await asyncio.sleep(rng.uniform(0.1, 0.4))


async def cut(proxy: FaultProxy, rng: random.Random) -> None:
    """Connections are reset; now and then new ones are refused for a moment."""
    if rng.random() < 0.3:
        proxy.refuse()
    proxy.cut()
    await asyncio.sleep(rng.uniform(0.0, 0.2))
    proxy.accept()


async def half_open(proxy: FaultProxy, rng: random.Random) -> None:
    """Connections stay and nothing passes, for as long as it takes to be noticed; then they are gone."""
    proxy.freeze()
    await asyncio.sleep(rng.choice([0.5, 5.0]))
    if rng.random() < 0.5:
        proxy.cut()
    proxy.thaw()
    await asyncio.sleep(1.0)


Fault = Callable[[FaultProxy, random.Random], Awaitable[None]]  # strikes before it first waits


FAULTS = [pytest.param(slow, marks=pytest.mark.long), cut, half_open]  # the mildest takes the longest


async def during(
    answer: Callable[[], Awaitable[outrider.Generation]], fault: Fault, proxies: list[FaultProxy], seed: int
) -> outrider.Generation:
    """An answer that a fault strikes again and again, once at least and five times at most."""
    rng = random.Random(seed)
    for _ in range(10):  # an answer may be whole before there is a connection to strike
        task, struck = asyncio.ensure_future(answer()), 0
        try:
            while struck < 5 and not task.done():
                await asyncio.sleep(rng.uniform(0.02, 0.2))
                proxy = rng.choice(proxies)
                if proxy.connections and not task.done():
                    struck += 1
                    await fault(proxy, rng)
        finally:
            for proxy in proxies:
                proxy.delay_s = proxy.jitter_s = 0.0
                proxy.thaw()
                proxy.accept()
        result = await task
        if struck:
            return result
    raise AssertionError("ten answers were whole before anything happened to them")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("where", ["client", "verifier", "drafter", "redis"])
async def test_the_text_survives_a_bad_network(faulty: Faulty, prompts: list[str], where: str, fault: Fault) -> None:
    quiet = await faulty.text(prompts[0], seed=41, speculation="off")
    result = await during(partial(faulty.text, prompts[0], seed=41), fault, [faulty.proxies[where]], seed=7)
    assert result.token_ids == quiet.token_ids
    assert result.text == quiet.text


async def test_the_text_survives_faults_on_every_link_at_once(faulty: Faulty, prompts: list[str]) -> None:
    quiet = await faulty.text(prompts[1], seed=42, speculation="off")
    everywhere = list(faulty.proxies.values())
    result = await during(partial(faulty.text, prompts[1], seed=42), cut, everywhere, seed=3)
    assert (result.token_ids, result.text) == (quiet.token_ids, quiet.text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_drafting_over_a_bad_network_changes_nothing_and_the_session_does_not_notice(
    faulty: Faulty, tokenizer: object, prompts: list[str], fault: Fault
) -> None:
    await trust(faulty.cluster)
    verifier = faulty.cluster.processes["verifier-0"].address
    drafter = faulty.cluster.processes["drafter-0"].address
    prompt = [5, 6, 7, 259, 361]
    contract = Contract(seed=5, max_tokens=TOKENS, temperature=0.8)
    plain = await decode(verifier, prompt, contract, plan=OFF)
    async with FaultProxy(verifier) as between:
        done = asyncio.Event()

        async def strike() -> None:
            rng = random.Random(9)
            while not done.is_set():
                await asyncio.sleep(rng.uniform(0.1, 0.4))
                await fault(between, rng)

        striking = asyncio.ensure_future(strike())
        accepted = 0
        async with asyncio.timeout(100):
            while not accepted:  # whole answers pass while connections are refused
                answer: Answer = await decode(
                    verifier, prompt, contract, plan=SPECULATE, drafters=[drafter], upstream=between.address, pace=0.004
                )
                assert answer.tokens == plain.tokens
                accepted += answer.accepted
        done.set()
        await striking
