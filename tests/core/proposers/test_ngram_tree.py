"""The best nodes are the best, parents come first, and what was counted becomes chances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.proposers.interpolation import Interpolation, MatchRun, MatchRuns, MatchTrie
from outrider.core.proposers.ngram_tree import NOTHING, BestOf, Branch, Continuation, best_nodes

RUNS = st.lists(st.builds(MatchRun, st.lists(st.integers(0, 2), max_size=3), st.integers(1, 3)), min_size=1, max_size=5)
FOUND = st.lists(RUNS, min_size=1, max_size=3)


class Fixed:
    """A source that always proposes the same continuation."""

    def __init__(self, *chances: float) -> None:
        count = len(chances)
        self.proposal = Continuation(tuple(range(-1, count - 1)), tuple(range(count)), chances, matched=count)

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        return self.proposal


class Small:
    """A trie that is given in full."""

    def __init__(self, branches: dict[tuple[int, float], Small]) -> None:
        self.branches = branches

    def children(self) -> Iterable[Branch]:
        return [Branch(token, chance, below) for (token, chance), below in self.branches.items()]


def found(groups: list[list[MatchRun]]) -> list[MatchRuns]:
    """Groups of runs as matches of falling length."""
    return [MatchRuns(2 * (len(groups) - index), runs) for index, runs in enumerate(groups)]


def slow_chances(groups: Sequence[MatchRuns], trust: Interpolation) -> dict[tuple[int, ...], float]:
    """Chance of every path's last token, one path at a time."""
    paths = {tuple(run.tokens[:end]) for _, runs in groups for run in runs for end in range(1, len(run.tokens) + 1)}
    chances = {}
    for path in paths:
        passed, chance, left = len(path) - 1, 0.0, 1.0
        for matched, runs in groups:
            here = [run for run in runs if len(run.tokens) > passed and tuple(run.tokens[:passed]) == path[:-1]]
            count = sum(run.times for run in here)
            if count:
                share = left * trust.weight(matched + passed, count, len({run.tokens[passed] for run in here}))
                chance += share * sum(run.times for run in here if run.tokens[passed] == path[-1]) / count
                left -= share
        chances[path] = chance
    return chances


def as_paths(proposal: Continuation) -> dict[tuple[int, ...], float]:
    """Each node's path and chance. Fails where a parent does not come before its child."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(proposal.parents, proposal.tokens, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, proposal.chances, strict=True))


@given(FOUND, st.integers(0, 6), st.integers(0, 4))
def test_no_other_subtree_of_that_size_and_depth_has_a_larger_sum_of_path_scores(
    groups: list[list[MatchRun]], nodes: int, depth: int
) -> None:
    trust = Interpolation()
    chances = slow_chances(found(groups), trust)
    scores = {}
    for path in sorted(chances, key=len):
        scores[path] = scores.get(path[:-1], 1.0) * chances[path]
    reachable = [path for path in scores if len(path) <= depth]
    size = min(nodes, len(reachable))
    best = max(
        sum(scores[path] for path in chosen)
        for chosen in combinations(reachable, size)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    proposal = best_nodes(MatchTrie(found(groups), trust), nodes, depth, matched=1)
    paths = as_paths(proposal)
    assert len(paths) == size
    assert proposal.expected == pytest.approx(best)
    assert paths == pytest.approx({path: chances[path] for path in paths})


@given(FOUND)
def test_the_chances_of_siblings_never_exceed_one(groups: list[list[MatchRun]]) -> None:
    proposal = best_nodes(MatchTrie(found(groups), Interpolation()), 100, 4, matched=1)
    for parent in {-1, *range(len(proposal.tokens))}:
        siblings = [chance for above, chance in zip(proposal.parents, proposal.chances, strict=True) if above == parent]
        assert all(0.0 < chance <= 1.0 for chance in siblings)
        assert sum(siblings) <= 1.0 + 1e-9


def test_the_best_path_comes_first() -> None:
    end = Small({})
    trie = Small({(1, 0.5): Small({(3, 0.9): end}), (2, 0.48): Small({(4, 1.0): end})})
    assert best_nodes(trie, 3, 9, matched=2) == Continuation((-1, -1, 1), (1, 2, 4), (0.5, 0.48, 1.0), 2)
    assert best_nodes(trie, 9, 1, matched=2) == Continuation((-1, -1), (1, 2), (0.5, 0.48), 2)


@pytest.mark.parametrize(("nodes", "depth"), [(0, 4), (4, 0)])
def test_an_empty_budget_gets_no_proposal(nodes: int, depth: int) -> None:
    assert best_nodes(Small({(1, 1.0): Small({})}), nodes, depth, matched=2) == NOTHING


def test_the_source_with_the_most_expected_accepted_tokens_is_chosen() -> None:
    wide, long = Fixed(0.9), Fixed(0.7, 0.7, 0.7)
    assert long.proposal.expected == pytest.approx(0.7 + 0.49 + 0.343)
    for sources in ((wide, long), (long, wide), (BestOf([]), long, wide)):
        assert BestOf(sources).propose([1], 3, 3) == long.proposal
    assert BestOf([]).propose([1], 3, 3) == NOTHING


def test_longer_and_more_frequent_matches_are_trusted_more() -> None:
    trust = Interpolation()
    for length in range(1, 16):
        assert trust.weight(length, 1, 1) < trust.weight(length + 1, 1, 1) < trust.weight(length + 1, 2, 1) < 1.0
    assert trust.weight(16, 1000, 1) == trust.weight(99, 10**6, 1) < 1.0


def test_a_match_that_is_always_right_is_trusted_and_one_that_never_is_is_not() -> None:
    right, wrong = Interpolation(), Interpolation()
    match = [MatchRuns(3, [MatchRun([7, 8], 1)])]
    for _ in range(100):
        right.observe(match, 7)
        wrong.observe(match, 9)
    assert right.weight(3, 1, 1) > 0.9
    assert wrong.weight(3, 1, 1) < 0.1
    for other in ((4, 1, 1), (3, 2, 1), (3, 1, 2)):
        assert right.weight(*other) == wrong.weight(*other) == Interpolation().weight(*other)


def test_a_long_match_that_predicts_no_better_than_the_short_ones_earns_little() -> None:
    """What follows depends on the last token alone: after it 7 and 8 are as frequent."""
    trust = Interpolation()
    for turn in range(800):
        trust.observe(
            [MatchRuns(6, [MatchRun([7], 1)]), MatchRuns(1, [MatchRun([7], 10), MatchRun([8], 10)])], 7 + turn % 2
        )
    assert Interpolation().weight(6, 1, 1) > 0.5 > 0.2 > trust.weight(6, 1, 1)
    assert trust.weight(1, 20, 2) > 0.9


def test_matches_at_the_end_of_the_text_count_for_nothing() -> None:
    trust = Interpolation()
    ended = [MatchRuns(5, [MatchRun([], 3)]), MatchRuns(2, [MatchRun([4], 1)])]
    trust.observe(ended, 4)
    assert trust.weight(5, 3, 1) == Interpolation().weight(5, 3, 1)
    assert as_paths(best_nodes(MatchTrie(ended, trust), 9, 9, matched=5)) == {(4,): trust.weight(2, 1, 1)}
