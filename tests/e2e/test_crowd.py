"""A crowd at one router, a third of which goes away midway: what any of them receives is the target's own text."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import pytest
import pytest_asyncio

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

CROWD = 32
TOKENS = 64
STAY = 4  # of those that receive all of it: the crowd thins out around them
LONGER = 256  # tokens for each of these
SEED = 3  # of who goes away, and where


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def roomy() -> AsyncIterator[LocalCluster]:
    """A slot for everyone. With overlap, drafters draft however fast the target is."""
    target, small = MODELS / "target", MODELS / "drafter"
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, overlap=True),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=CROWD)],
        drafter=[DrafterConfig(model=model, dtype="float32", slots=CROWD) for model in (small, target)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


@dataclass
class Received:
    """What one of the crowd got."""

    session_id: str = ""
    tokens: list[int] = field(default_factory=list)
    result: outrider.Generation | None = None  # None: it left

    @property
    def whole(self) -> bool:
        return self.result is not None and self.result.finish_reason == "length"


@dataclass
class Crowd:
    """Callers of one client. `most` is how many of them were being answered at the same time."""

    client: outrider.AsyncClient
    now: int = 0
    most: int = 0

    async def receive(self, stream: outrider.AsyncStream, until: int, *, leave: bool) -> Received:
        """Goes away after `until` tokens: leaves the stream, or has the session cancelled and reads on."""
        received, away = Received(), False
        async with stream:
            async for chunk in stream:
                if not received.session_id:
                    received.session_id = stream.session_id
                    self.now += 1
                    self.most = max(self.most, self.now)
                received.tokens += chunk.token_ids
                if away or len(received.tokens) < until:
                    continue
                if leave:
                    break
                away = True
                await self.client.cancel(stream.session_id)
            else:
                received.result = stream.result
        self.now -= 1
        return received


@pytest.mark.long
async def test_a_crowd_of_which_a_third_leaves_receives_the_text_of_each_session_alone(
    roomy: LocalCluster, prompts: list[str]
) -> None:
    rng = random.Random(SEED)
    places = {number: rng.randrange(1, TOKENS * 2 // 3) for number in rng.sample(range(CROWD), CROWD // 3)}
    leavers = set(rng.sample(sorted(places), len(places) // 2))
    staying = rng.sample(sorted(set(range(CROWD)) - set(places)), STAY)
    lengths = [LONGER if number in staying else TOKENS for number in range(CROWD)]

    async with outrider.AsyncClient(roomy.router_address) as client:

        def stream(number: int, policy: Literal["ema", "fixed", "off"]) -> outrider.AsyncStream:
            return client.stream(
                prompts[number % len(prompts)],
                temperature=(0.0, 0.8, 1.0)[number % 3],
                seed=number,
                max_tokens=lengths[number],
                ignore_eos=True,
                speculation=policy,
                timeout=60,
            )

        crowd = Crowd(client)
        alone = [await crowd.receive(stream(number, "off"), sum(lengths), leave=False) for number in range(CROWD)]
        assert crowd.most == 1
        together = await asyncio.gather(
            *(
                crowd.receive(
                    stream(number, "fixed" if number % 2 else "ema"),
                    places.get(number, sum(lengths)),
                    leave=number in leavers,
                )
                for number in range(CROWD)
            )
        )
        sessions = [await client.get_session(received.session_id) for received in together]

    for reference, received, length in zip(alone, together, lengths, strict=True):
        assert len(reference.tokens) == length
        assert received.tokens == (reference.tokens if received.whole else reference.tokens[: len(received.tokens)])
        if received.whole:
            assert received.result is not None
            assert reference.result is not None
            assert received.result.text == reference.result.text
    whole = {number for number in range(CROWD) if together[number].whole}
    midway = {number for number in places if sessions[number].finish_reason == "cancelled"}
    assert whole | set(places) == set(range(CROWD))
    assert min(len(midway & leavers), len(midway - leavers)) > 2
    assert all(0 < len(together[number].tokens) < TOKENS for number in midway)
    assert crowd.most > CROWD // 2
    assert sum(received.result.usage.accepted for received in together if received.result) > CROWD
