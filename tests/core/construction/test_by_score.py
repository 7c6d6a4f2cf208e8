"""Best first and OPT-Tree find the best tree of their size; EAGLE-2 expands and re-ranks as its paper does."""

import itertools
from collections.abc import Iterator

import pytest

from outrider.core.construction import BestFirst, Eagle2, OptTree, TreeTerms
from outrider.core.construction.expansion import LOWEST_SCORE
from outrider.core.session.contract import Plan
from tests.core.construction.rows import Draft, Path


def trees(vocabulary: int, depth: int, size: int) -> Iterator[frozenset[Path]]:
    """Every tree of that size."""
    level: set[frozenset[Path]] = {frozenset()}
    for _ in range(size):
        level = {
            tree | {(*parent, token)}
            for tree in level
            for parent in ((), *tree)
            for token in range(vocabulary)
            if len(parent) < depth and (*parent, token) not in tree
        }
    yield from level


@pytest.mark.parametrize("construction", [BestFirst(), OptTree(threshold=0.0)], ids=lambda each: each.name)
@pytest.mark.parametrize("seed", range(6))
def test_the_sum_of_path_scores_is_the_largest_of_all_trees_of_its_size(construction: BestFirst, seed: int) -> None:
    for size in range(1, 5):
        draft = Draft(3, seed, spread=0.7)  # no path below what is never worth a node
        found = draft.grown(construction, TreeTerms(Plan(depth=3, width=3, nodes=size)))
        best = max(trees(3, 3, size), key=lambda tree: sum(map(draft.score, tree)))
        assert sum(map(draft.score, found)) == pytest.approx(sum(map(draft.score, best)))
        assert len(found) == size


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.2, 0.6])
def test_opt_tree_stops_when_a_level_adds_no_more_than_the_threshold(threshold: float) -> None:
    for seed in range(10):
        draft, size = Draft(6, seed), 12
        draft.grown(OptTree(threshold), TreeTerms(Plan(depth=12, width=6, nodes=size)))
        reached = [{(*path, token) for path in expanded for token in range(6)} for expanded in draft.passes]
        sums = []
        for levels in range(len(reached) + 1):
            known = sorted((draft.score(path) for level in reached[:levels] for path in level), reverse=True)
            sums.append(sum(score for score in known[:size] if score >= LOWEST_SCORE))
        added = [after - before for before, after in itertools.pairwise(sums)]
        assert all(each > threshold for each in added[:-1])
        best = sorted((path for level in reached for path in level), key=draft.score, reverse=True)[:size]
        more = any(len(path) == len(reached) < 12 for path in best if draft.score(path) >= LOWEST_SCORE)
        assert added[-1] <= threshold or not more


def expand_and_rerank(draft: Draft, *, depth: int, k: int, width: int, nodes: int) -> list[Path]:
    """EAGLE-2 as its paper describes it."""
    drafted: list[Path] = []
    level: list[Path] = [()]
    for _ in range(depth):
        below = []
        for path in level:
            row = draft.chances(path)
            below += [(*path, token) for token in sorted(range(draft.vocabulary), key=lambda t: -row[t])[:width]]
        drafted += below
        level = sorted(below, key=draft.score, reverse=True)[:k]
    return sorted(drafted, key=draft.score, reverse=True)[:nodes]


@pytest.mark.parametrize("seed", range(12))
def test_eagle_2_expands_the_best_k_of_each_level_and_then_re_ranks_all(seed: int) -> None:
    for depth, k, width, nodes in [(4, 3, 3, 8), (3, 2, 4, 20), (5, 1, 2, 4), (1, 8, 8, 3)]:
        draft = Draft(8, seed)
        found = draft.grown(Eagle2(), TreeTerms(Plan(depth=depth, width=width, nodes=nodes), limit=k))
        assert set(found) == set(expand_and_rerank(draft, depth=depth, k=k, width=width, nodes=nodes))
        assert len(draft.passes) == depth


def test_eagle_2_sends_no_node_before_its_tree_is_complete() -> None:
    from outrider.core.tree.token_tree import TokenTree

    tree, terms, construction = TokenTree([1]), TreeTerms(Plan(depth=3, width=2, nodes=5), limit=2), Eagle2()
    while nodes := construction.frontier(tree, terms):
        for node in nodes:
            assert construction.propose(tree, node, [(1, -0.5), (2, -1.5)], terms) == []
    sent = construction.flush(tree, terms)
    assert len(sent) == 5
    assert all(node.parent is tree.root or node.parent in sent[:at] for at, node in enumerate(sent))
