"""What is drawn keeps to its shape, comes level by level, and begins anew with every commit."""

import itertools
import math

import numpy as np
import pytest

from drafter_svc.sessions.sampled_session import SampledSession
from outrider.core.construction.expansion import DrafterFits
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.stats import RECENT
from outrider.core.tree.delta import Delta, DigestMismatch
from outrider.core.tree.sampled_tree import SampledTree
from outrider.core.tree.static_trees import RankRates, Shape, best_shape, size_of
from outrider.core.tree.token_tree import TokenTree
from outrider.engine.interface.logits import HostLogits, logits_rows
from outrider.errors import InvalidRequest
from outrider.wire.drafter import delta_from_pb, delta_to_pb
from tests.core.acceptance.enumeration import shapes

VOCABULARY = 30
PROMPT = (4, 9, 2)
PLAN = Plan(depth=5, width=3, nodes=12)


class Rig:
    """A session, an upstream's copy of its tree, and a model that makes logits up."""

    def __init__(self, rule: str = "recursive-rejection", *, epoch: int = 1) -> None:
        contract = Contract(seed=4, max_tokens=100, rule=rule)
        self.fits = DrafterFits()
        self.upstream = SampledTree(PROMPT)
        snapshot = MirrorSnapshot(PROMPT, extend(EMPTY, PROMPT), contract, PLAN, 10_000, epoch=epoch)
        self.session = SampledSession(snapshot, 0, VOCABULARY)

    def level(self, level_s: float = 0.0) -> Delta | None:
        """Runs a level and sends it up."""
        chosen = self.session.next_segment(self.fits, chunk=64, limit=8, context=500, rows=600, level_s=level_s)
        if chosen is None:
            return None
        segment, nodes = chosen
        self.session.advance(segment, nodes)
        logits = [self.logits(self.session.tokens + self.session.tree.path(node)) for node in nodes]
        delta = self.session.expand(nodes, logits_rows(HostLogits(np.array(logits)), 0, len(nodes)), self.fits)
        message = delta_to_pb(delta, attachment=1, epoch=1, plan_version=0)
        assert delta_from_pb(message, VOCABULARY) == delta
        self.upstream.graft(1, delta)
        self.upstream.check_integrity()
        return delta

    def logits(self, text: list[int]) -> np.ndarray:
        return np.random.default_rng(text[-3:]).normal(0, 2, VOCABULARY).astype(np.float32)

    def commit(self, tokens: list[int]) -> None:
        self.session.commit(tokens)
        self.upstream.commit(tokens)
        self.session.learn(self.fits)
        assert (self.session.tree.digest, self.session.tree.size) == (self.upstream.digest, 0)

    def paths(self) -> list[tuple[int, ...]]:
        return [tuple(self.upstream.path(node)) for level in self.upstream.levels() for node in level]


def shape_of(tree: TokenTree) -> Shape:
    def below(node) -> Shape:
        return tuple(below(child) for child in node.children.values())

    return below(tree.root)


def test_the_shape_is_the_best_for_the_rates_and_every_level_is_sent_whole() -> None:
    rig = Rig()
    deltas = list(iter(rig.level, None))
    rates = rig.session._rates
    assert shape_of(rig.upstream) == best_shape(rates, nodes=PLAN.nodes, depth=PLAN.depth, expanded=8)
    depths = [{len(path) for path in rig.paths()[: sum(len(d.tokens) for d in deltas[:end])]} for end in (1, 2, 3)]
    assert depths == [{1}, {1, 2}, {1, 2, 3}]
    for level in rig.upstream.levels():
        for node in level:
            assert node.token in node.parent.q.tokens


def test_draws_after_a_commit_are_fresh_and_the_kv_of_accepted_nodes_is_kept() -> None:
    rig = Rig()
    list(iter(rig.level, None))
    path = max(rig.paths(), key=len)
    rig.commit([*path, 7])
    assert rig.session.cached == len(PROMPT) + len(path) - 1  # a leaf was never run
    list(iter(rig.level, None))
    assert rig.upstream.size == PLAN.nodes
    assert rig.session.cached == len(rig.session.tokens)
    # Even where the bonus is what had been drafted below the accepted path.
    longest = max(rig.paths(), key=len)
    rig.commit(list(longest[:2]))
    assert rig.level() is not None
    assert rig.session.cached == len(rig.session.tokens)


def test_draws_are_equal_within_an_epoch_and_differ_in_the_next() -> None:
    one, same, other = Rig(), Rig(), Rig(epoch=2)
    for rig in (one, same, other):
        list(iter(rig.level, None))
    assert one.paths() == same.paths() != other.paths()


def test_a_chain_is_drawn_for_rules_of_chains() -> None:
    rig = Rig("block-verification")
    list(iter(rig.level, None))
    assert [len(level) for level in rig.upstream.levels()] == [1] * PLAN.depth


def test_rank_rates_follow_the_accepted_ranks() -> None:
    chances = [0.5, 0.3, 0.1]
    generator = np.random.default_rng(0)
    found = []
    for _ in range(64):
        rates = RankRates()
        for accepted in generator.choice(4, 400, p=[*chances, 0.1]):
            rates.observe(3, int(accepted) if accepted < 3 else None)
        found.append(rates.rates(3))
    # A rate is a mean with falling weights; its variance is that of one draw x (1 - m) / (1 + m).
    for chance, mean in zip(chances, np.mean(found, axis=0), strict=True):
        deviation = math.sqrt(chance * (1 - chance) * (1 - RECENT) / (1 + RECENT) / len(found))
        assert mean == pytest.approx(chance, abs=3 * deviation)
    falling = rates.rates(9)
    assert all(one >= other > 0 for one, other in itertools.pairwise(falling))


def worth(shape: Shape, rates: list[float]) -> float:
    return sum(rate * (1 + worth(child, rates)) for rate, child in zip(rates, shape, strict=False))


@pytest.mark.parametrize("nodes", range(6))
def test_the_best_shape_has_the_most_expected_tokens_of_all(nodes: int) -> None:
    for rates in ([0.8, 0.1], [0.5, 0.4], [0.9, 0.5], [0.3, 0.29]):
        best = best_shape(rates, nodes=nodes, depth=3)
        assert size_of(best) == nodes
        assert worth(best, rates) == pytest.approx(max(worth(shape, rates) for shape in shapes(2, 3, nodes)))
    assert size_of(best_shape([0.5, 0.4], nodes=9, depth=3, min_product=0.3)) == 2


def test_malformed_draws_are_refused_and_late_draws_ignored() -> None:
    rig = Rig()
    first = rig.level()
    assert first is not None
    wrong = [
        {"drawn": ()},
        {"drawn": first.drawn * 2},
        {"tokens": (first.tokens[0],) * len(first.tokens)},
        {"tokens": tuple(range(VOCABULARY, VOCABULARY + len(first.tokens)))},
        {"parents": (5,) * len(first.tokens)},
    ]
    for change in wrong:
        fields = {name: getattr(first, name) for name in first.__slots__} | change
        with pytest.raises(InvalidRequest):
            SampledTree(PROMPT).graft(1, Delta(**fields))
    again = Delta(**{name: getattr(first, name) for name in first.__slots__} | {"first_id": 50})
    with pytest.raises(InvalidRequest, match="at once"):
        rig.upstream.graft(1, again)
    size_before = rig.upstream.size
    assert rig.upstream.graft(1, first) == ([], [])  # a replay
    assert rig.upstream.size == size_before
    tree = SampledTree(PROMPT)
    tree.commit([1])
    assert tree.graft(1, first) == ([], [])
    with pytest.raises(DigestMismatch):
        tree.graft(1, Delta(**{name: getattr(first, name) for name in first.__slots__} | {"root_digest": 1}))
