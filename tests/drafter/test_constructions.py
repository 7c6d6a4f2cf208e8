"""A drafter's session under each tree construction stays in step with its upstream, whatever the target commits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.scheduler import DraftScheduler
from drafter_svc.sessions.sampled_session import SampledSession
from outrider.core.construction import CONSTRUCTIONS, Eagle2, KAry
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.static_trees import depth_of, k_ary_shape
from outrider.errors import ConfigError
from tests.drafter.sessions.test_sampled_session import Rig as DrawnRig
from tests.drafter.sessions.test_sampled_session import shape_of
from tests.drafter.sessions.test_session import MOVES, Rig, paths

PLAN = Plan(depth=4, width=3, nodes=8)


@pytest.mark.parametrize("name", CONSTRUCTIONS)
@settings(max_examples=25)
@given(st.integers(0, 1000), MOVES, st.sampled_from([400, 40]))
def test_rows_masks_and_both_trees_stay_in_step(
    name: str, seed: int, moves: list[int | tuple[int, int]], credit: int
) -> None:
    Rig(PLAN, seed, credit, tree=name).play(moves)


def test_eagle_2_sends_its_best_nodes_when_the_tree_is_complete_and_not_before() -> None:
    rig = Rig(PLAN, seed=1, tree="eagle-2")
    while rig.level():
        assert paths(rig.upstream) == set()
    assert len(paths(rig.upstream)) == PLAN.nodes
    assert isinstance(rig.session.construction, Eagle2)


def test_a_chain_stays_a_chain_and_grows_after_a_commit() -> None:
    rig = Rig(PLAN, seed=2, tree="chain")
    while rig.level():
        pass
    assert [len(level) for level in rig.upstream.levels()] == [1] * PLAN.depth
    rig.commit(rig.likely(2))
    assert [len(level) for level in rig.upstream.levels()] == [1] * (PLAN.depth - 2)
    while rig.level():
        pass
    assert [len(level) for level in rig.upstream.levels()] == [1] * PLAN.depth


def test_a_drawn_tree_takes_the_shape_of_its_construction() -> None:
    rig = DrawnRig()
    contract = Contract(seed=4, max_tokens=100, rule="recursive-rejection")
    plan = Plan(depth=3, width=2, nodes=9)
    rig.session = SampledSession(MirrorSnapshot((4, 9, 2), rig.upstream.digest, contract, plan, 1000), 0, 30, KAry())
    while rig.level():
        pass
    assert shape_of(rig.upstream) == k_ary_shape(2, nodes=9, depth=3)


def test_a_drawn_tree_is_shallower_the_more_the_upstreams_wait_costs() -> None:
    depths = []
    for time_cost_tokens_per_s in (0.0, 30.0, 300.0):
        rig = DrawnRig()
        rig.session.terms = SentTerms(time_cost_tokens_per_s=time_cost_tokens_per_s)
        while rig.level(level_s=0.01):
            pass
        depths.append(depth_of(shape_of(rig.upstream)))
    assert depths[0] > depths[1] > depths[2]


def test_a_construction_that_does_not_exist_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="bonsai"):
        DraftScheduler(None, level_nodes=8, prefill_chunk=8, send=print, resync=print, tree="bonsai")  # type: ignore[arg-type]
