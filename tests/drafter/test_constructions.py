"""A drafter's session under each tree construction: in step with its upstream, whatever the target says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.drawn import DrawnSession
from drafter_svc.grower import Grower
from drafter_svc.ranked import RankedSession
from drafter_svc.session import Snapshot
from outrider.core.construction import CONSTRUCTIONS, Eagle2, KAry, construction_of
from outrider.core.contract import Contract, Plan
from outrider.core.digest import EMPTY, extend
from outrider.core.growth import Fits
from outrider.core.shapes import depth_of, k_ary_shape
from outrider.errors import ConfigError
from tests.drafter.test_drawn import Rig as DrawnRig
from tests.drafter.test_drawn import shape_of
from tests.drafter.test_session import PROMPT, TERMS, VOCABULARY, Rig, paths

PLAN = Plan(depth=4, width=3, nodes=8)


class ConstructedRig(Rig):
    """Tells what was held back when nothing more is to be run, as the grower does."""

    def __init__(self, name: str, seed: int, credit: int = 400) -> None:
        super().__init__(PLAN, seed, credit)
        snapshot = Snapshot(PROMPT, extend(EMPTY, PROMPT), TERMS, PLAN, credit)
        self.session = RankedSession(snapshot, 0, VOCABULARY, construction_of(name))

    def level(self, limit: int = 3) -> bool:
        went_on = super().level(limit)
        if not went_on:
            self.deliver(self.session.rest(self.fit))
        return went_on


@pytest.mark.parametrize("name", CONSTRUCTIONS)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(0, 4), st.integers(0, VOCABULARY - 1))), max_size=15),
    st.sampled_from([400, 40]),
)
def test_rows_masks_and_both_trees_stay_in_step(
    name: str, seed: int, moves: list[int | tuple[int, int]], credit: int
) -> None:
    rig = ConstructedRig(name, seed, credit)
    for move in moves:
        if isinstance(move, int):
            for _ in range(move):
                rig.level()
            rig.check()
        else:
            along, other = move
            rig.commit([*rig.likely(along), other])


def test_eagle_2_tells_its_best_nodes_when_the_tree_is_complete_and_not_before() -> None:
    rig = ConstructedRig("eagle-2", seed=1)
    while rig.level():
        assert paths(rig.upstream) == set()
    assert len(paths(rig.upstream)) == PLAN.nodes
    assert isinstance(rig.session.construction, Eagle2)


def test_a_chain_stays_a_chain_and_a_commit_prolongs_it() -> None:
    rig = ConstructedRig("chain", seed=2)
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
    rig.session = DrawnSession(Snapshot((4, 9, 2), rig.upstream.digest, contract, plan, 1000), 0, 30, KAry())
    while rig.level():
        pass
    assert shape_of(rig.upstream) == k_ary_shape(2, nodes=9, depth=3)


def test_while_the_upstream_waits_a_drawn_tree_is_as_deep_as_pays() -> None:
    depths = []
    for time_price in (0.0, 30.0, 300.0):
        rig = DrawnRig()
        rig.session.time_price = time_price
        chosen = rig.session.next_segment(Fits(), chunk=64, limit=8, context=500, rows=600, level_s=0.01)
        assert chosen is None or chosen[1] == [rig.session.tree.root]
        depths.append(depth_of(rig.session._shapes[rig.session.tree.root]))
    assert depths[0] > depths[1] > depths[2]


def test_a_construction_that_does_not_exist_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="bonsai"):
        Grower(None, level_nodes=8, prefill_chunk=8, send=print, resync=print, tree="bonsai")  # type: ignore[arg-type]
