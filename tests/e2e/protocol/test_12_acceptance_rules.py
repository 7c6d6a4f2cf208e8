"""12. Acceptance rules."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.session.contract import LOSSY, OFF, RULES, Contract, Plan, PlanOverlap
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.types import contract_to_pb
from tests.e2e.mini_router import decode
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.page import table
from tests.e2e.protocol.peers import decoding, delta, drafting

pytestmark = pytest.mark.asyncio(loop_scope="session")

RIGHT = Contract(seed=1, max_tokens=200, temperature=0.0, rule="recursive-rejection")
ROUNDS = Plan(version=1, depth=4, width=4, nodes=16, wait_us=2_000_000, overlap=PlanOverlap.ROUNDS)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def greedy(verifier: str, text: Text) -> Text:
    """At temperature 0 a token that was drawn is accepted exactly if it is the likeliest."""
    answer = await decode(verifier, text.prompt, RIGHT, plan=OFF)
    return Text(text.prompt, answer.tokens, contract_to_pb(RIGHT))


def rows(*tokens: int) -> list[pb.DrawnFrom]:
    """For each node of a chain the distribution that it was drawn from: it and one other token."""
    return [pb.DrawnFrom(tokens=sorted([token, (token + 1) % 4096]), weights=[3, 7]) for token in tokens]


async def test_the_rules_on_the_page_equal_those_of_the_code() -> None:
    drawn = {
        ChildSampling.FREELY: "any; best by log q + g",
        ChildSampling.RANKED: "any; best by log q",
        ChildSampling.SAMPLED: "drawn from q",
    }
    expected = []
    for name in RULES:
        rule = rule_of(Contract(seed=0, max_tokens=1, rule=name))
        shape = (
            "any tree"
            if rule.child_sampling is not ChildSampling.SAMPLED
            else "a chain"
            if rule.chain
            else "a fixed tree"
        )
        expected.append([name, drawn[rule.child_sampling], shape, "no" if name in LOSSY else "yes"])
    assert table(12) == expected


async def test_no_draw_depends_on_drafted_nodes_under_target_match(verifier: str, drafter: str, text: Text) -> None:
    """A drafter knows the seed: it could choose among several draws of a token by where it lets steps end."""
    contract = Contract(seed=11, max_tokens=96, temperature=0.8, rule="target-match")
    plain = await decode(verifier, text.prompt, contract, plan=OFF)
    drafted = await decode(verifier, text.prompt, contract, plan=ROUNDS, drafters=[drafter], pace=0.01)
    assert drafted.accepted > 10
    assert drafted.tokens == plain.tokens


async def test_a_drawn_chain_is_accepted_up_to_its_first_wrong_token(verifier: str, greedy: Text) -> None:
    right, root = greedy.answer, len(greedy.prompt) - 1
    async with (
        decoding(verifier, tokens=greedy.prompt, contract=greedy.contract, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.full()
        await drafter.attach(router.session)
        chain = [*right[8:11], (right[11] + 1) % 4096]
        drafter.send_frame(**delta(greedy.whole, root + 8, chain, drawn=rows(*chain)))
        await drafter.received_all(router.session)
        report = await router.step()
        assert (report.verified, report.accepted) == (4, 3)
        # Late: its root has been left behind. No error is reported, and nothing of it is taken, right as it is.
        late = right[9:12]
        drafter.send_frame(**delta(greedy.whole, root + 9, late, first_id=5, drawn=rows(*late)))
        await drafter.received_all(router.session)
        report = await router.step()
        assert (report.verified, report.accepted) == (0, 0)
        assert router.tokens == greedy.whole[: len(router.tokens)]
        assert not drafter.inbox.of("closed", 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"drawn": []},
        {"drawn": "another's"},
        {"drawn": "one too many"},
        {"drawn": "falling"},
        {"drawn": "weightless"},
        {"parents": [0, 0, 0], "drawn": "twins"},
    ],
    ids=lambda wrong: str(wrong["drawn"]),
)
async def test_an_impossible_draw_costs_the_session_its_drafter(
    verifier: str, greedy: Text, wrong: dict[str, Any]
) -> None:
    right, root = greedy.answer[8:11], len(greedy.prompt) - 1
    kinds = {
        "another's": rows(*(token + 5 for token in right)),
        "one too many": rows(*right, right[0]),
        "falling": [pb.DrawnFrom(tokens=[right[0] + 1, right[0]], weights=[1, 1]), *rows(*right[1:])],
        "weightless": [pb.DrawnFrom(tokens=[right[0]], weights=[0]), *rows(*right[1:])],
        "twins": rows(right[0]),
    }
    changes = wrong | {"drawn": kinds.get(wrong["drawn"], []) if isinstance(wrong["drawn"], str) else []}
    tokens = [right[0]] * 3 if wrong["drawn"] == "twins" else right
    async with (
        decoding(verifier, tokens=greedy.prompt, contract=greedy.contract, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.full()
        await drafter.attach(router.session)
        drafter.send_frame(**delta(greedy.whole, root + 8, tokens, **changes))
        assert "malformed: " in (await drafter.inbox.take("closed", 1)).reason
        await router.step()
        assert router.tokens == greedy.whole[: len(router.tokens)]


async def test_drawn_children_come_at_once_and_a_session_has_one_drafter(verifier: str, greedy: Text) -> None:
    right, root = greedy.answer, len(greedy.prompt) - 1
    async with (
        decoding(verifier, tokens=greedy.prompt, contract=greedy.contract, window=8) as router,
        drafting(verifier) as drafter,
        drafting(verifier) as second,
    ):
        await router.full()
        await drafter.attach(router.session)
        attachment = await second.subscribe(router.session)
        assert "at most 1 drafter" in (await second.inbox.take("closed", attachment)).reason
        drafter.send_frame(**delta(greedy.whole, root + 8, [right[8]], drawn=rows(right[8])))
        drafter.send_frame(**delta(greedy.whole, root + 8, [right[8] + 1], first_id=2, drawn=rows(right[8])))
        assert "must come at once" in (await drafter.inbox.take("closed", 1)).reason
