"""A drafter's copy of a session follows what its upstream sent last, and detects where the two differ."""

from __future__ import annotations

import pytest

from drafter_svc.sessions.mirror import Mirror
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate

TEXT = (3, 1, 4)
PLAN = Plan(version=2, depth=4, nodes=8)


def mirror(credit: int = 400) -> Mirror:
    return Mirror(MirrorSnapshot(TEXT, extend(EMPTY, TEXT), Contract(seed=1, max_tokens=9), PLAN, credit))


def update(
    tokens: tuple[int, ...] = (), *, position: int = 3, plan: Plan | None = None, digest: int = 0
) -> MirrorUpdate:
    digest = digest or extend(EMPTY, TEXT + tokens)
    return MirrorUpdate(position, tokens, digest, plan, SentTerms(0.5, 2.0, True), credit=7, dropped=())


def test_a_mirror_applies_fitting_updates_and_rejects_others() -> None:
    copy = mirror()
    assert copy.apply_update(update((1, 5)))
    assert copy.tokens == [*TEXT, 1, 5]
    assert (copy.terms, copy.credit) == (SentTerms(0.5, 2.0, True), 7)
    assert not copy.apply_update(update((1, 5)))  # it has that already
    assert not mirror().apply_update(update((1, 5), digest=1))


@pytest.mark.parametrize(("version", "taken"), [(1, False), (2, False), (3, True)])
def test_a_plan_of_a_higher_version_alone_is_taken(version: int, taken: bool) -> None:
    copy, plan = mirror(), Plan(version=version, depth=1, nodes=1)
    assert copy.apply_update(update(plan=plan))
    assert copy.plan == (plan if taken else PLAN)


def test_a_mirror_announces_no_node_beyond_its_credit() -> None:
    copy = mirror(credit=2)
    nodes = [copy.tree.add(copy.tree.root, token, -0.5) for token in range(3)]
    delta = copy.announce(nodes)
    assert (delta.first_id, delta.tokens) == (1, (0, 1))
    assert copy.announce(nodes[2:]).tokens == ()
    copy.credit = 3
    assert copy.announce(nodes[2:]).tokens == (2,)
