"""What one router's sessions learned, another's begin with; and nothing that is stored can break them."""

import json

import pytest

from outrider.core.control.depth.goodput import AcceptancePriors, Goodput
from outrider.core.session.contract import Plan, StepReport
from outrider.errors import Unavailable
from outrider.store.acceptance_priors import MAX_STEPS, share
from outrider.store.redis.client import Client, connect

KEY = "outrider:{acceptance}:target:drafter:hot"
NAME = "target:drafter:hot"


def learn(priors: AcceptancePriors, steps: int, *, accepted: int = 2, verified: int = 4) -> None:
    gamma = Goodput(Plan(depth=16, nodes=32), priors)
    for _ in range(steps):
        gamma.observe(
            StepReport(
                verified=verified,
                accepted=accepted,
                verified_depth=verified,
                elapsed_us=30_000,
                waited_us=5_000,
                first_us=3_000,
                level_us=1_000,
                rows=5,
                sessions=1,
                ranks=bytes(accepted),
            )
        )


async def test_statistics_of_routers_add_up_for_new_sessions(client: Client) -> None:
    one, two, new = AcceptancePriors(), AcceptancePriors(), AcceptancePriors()
    learn(one, 100)
    learn(two, 50)
    await share(client, NAME, one)
    await share(client, NAME, two)
    await share(client, NAME, new)
    await share(client, NAME, one)
    assert new.counts.steps == two.counts.steps == one.counts.steps == 150
    assert one.fresh.steps == new.fresh.steps == 0
    assert new.first.mean == pytest.approx(0.003)
    assert new.step.mean == pytest.approx(0.025)
    depth = Goodput(Plan(depth=16, nodes=32), new).plan().depth
    assert depth == Goodput(Plan(depth=16, nodes=32), one).plan().depth < 16
    assert await client.ttl(KEY) > 0


async def test_shared_statistics_count_once_and_old_steps_fade(client: Client) -> None:
    priors = AcceptancePriors()
    learn(priors, 10)
    for _ in range(5):
        await share(client, NAME, priors)
    assert priors.counts.steps == 10
    for _ in range(3):
        learn(priors, int(MAX_STEPS))
        await share(client, NAME, priors)
    assert priors.counts.steps <= 2 * MAX_STEPS


@pytest.mark.parametrize(
    "stored",
    [
        b"no json",
        b"[]",
        b"{}",
        json.dumps({"counts": [1.0], "times": {}}).encode(),
        json.dumps({"counts": [-1.0] * 144, "times": {}}).encode(),
        json.dumps({"counts": [float("nan")] * 144, "times": {}}).encode(),
        json.dumps({"counts": [0.0] * 144, "times": {"first": "soon"}}).encode(),
        json.dumps({"counts": [0.0] * 144, "times": {"first": -1.0}}).encode(),
        b"\xff\xfe",
    ],
)
async def test_malformed_stored_statistics_are_replaced(client: Client, stored: bytes) -> None:
    await client.set(KEY, stored)
    priors = AcceptancePriors()
    learn(priors, 10)
    await share(client, NAME, priors)
    assert priors.counts.steps == 10
    again = AcceptancePriors()
    await share(client, NAME, again)
    assert again.counts.steps == 10


async def test_statistics_survive_a_missing_redis(client: Client) -> None:
    priors, away = AcceptancePriors(), connect("redis://127.0.0.1:1")
    learn(priors, 10)
    with pytest.raises(Unavailable):
        await share(away, NAME, priors)
    await away.aclose()
    assert priors.fresh.steps == priors.counts.steps == 10
    await share(client, NAME, priors)
    assert priors.counts.steps == 10
