"""The default rule is lossless: whatever the tree, the commit is the target's own text."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from outrider.core.acceptance import SeededRandom, VerifiedRows, Walk
from outrider.core.acceptance.exact_match import SharedNoise
from outrider.core.acceptance.interface import Judge
from outrider.core.sampling.sampler import Choice, Sampler
from outrider.core.session.contract import Contract

Path = tuple[int, ...]


def all_trees(vocabulary: int, depth: int) -> Iterator[frozenset[Path]]:
    """Every tree over the vocabulary down to a depth, as the set of its paths."""
    if depth == 0:
        yield frozenset()
        return
    below = list(all_trees(vocabulary, depth - 1))
    for branches in itertools.product([None, *below], repeat=vocabulary):
        yield frozenset(
            (token, *path) for token, branch in enumerate(branches) if branch is not None for path in [(), *branch]
        )


def rows_of(tree: frozenset[Path]) -> tuple[list[Path], list[int], list[int]]:
    """Row 0 is the root; parents before children."""
    paths: list[Path] = [(), *sorted(tree, key=lambda path: (len(path), path))]
    row = {path: i for i, path in enumerate(paths)}
    return paths, [-1] + [row[path[:-1]] for path in paths[1:]], [-1] + [path[-1] for path in paths[1:]]


class Chosen(Judge):
    """A judge whose choices a function makes."""

    def __init__(self, choose_at: Callable[[int], Choice]) -> None:
        self.choose = choose_at  # type: ignore[method-assign]


def walk(parents: list[int], tokens: list[int], choose_at: Callable[[int], Choice]) -> Walk:
    return SharedNoise().walk(VerifiedRows(parents, tokens), Chosen(choose_at), SeededRandom())


def commit_of(tree: frozenset[Path], truth: Path) -> Path:
    """What a step commits when the target chooses `truth` along its own path and something else elsewhere."""
    paths, parents, tokens = rows_of(tree)

    def choose_at(row: int) -> Choice:
        path = paths[row]
        on_path = truth[: len(path)] == path
        return Choice(truth[len(path)] if on_path else -7, 1.0)

    walked = walk(parents, tokens, choose_at)
    assert [paths[row] for row in walked.path] == [truth[: i + 1] for i in range(len(walked.path))]
    return tuple(choice.token for choice in walked.choices)


@pytest.mark.parametrize(("vocabulary", "depth"), [(2, 3), (3, 2)])
def test_every_tree_commits_the_targets_path(vocabulary: int, depth: int) -> None:
    trees = list(all_trees(vocabulary, depth))
    assert len(trees) == {(2, 3): 676, (3, 2): 729}[vocabulary, depth]
    for tree in trees:
        for truth in itertools.product(range(vocabulary), repeat=depth + 1):
            committed = commit_of(tree, truth)
            assert committed == truth[: len(committed)]
            held = max(i for i in range(depth + 1) if i == 0 or truth[:i] in tree)
            assert len(committed) == held + 1  # all that the tree held, and the bonus


def test_a_thousand_random_trees_commit_the_targets_path() -> None:
    generator = np.random.default_rng(8)
    for _ in range(1000):
        vocabulary, depth = generator.integers(2, 50), generator.integers(1, 9)
        truth = tuple(int(token) for token in generator.integers(0, vocabulary, depth + 1))
        tree: set[Path] = set()
        for _ in range(generator.integers(0, 40)):
            known = [(), *tree, *([truth[:-2]] if truth[:-2] in tree else [])]
            parent = known[generator.integers(len(known))]
            if len(parent) < depth:
                follow = generator.random() < 0.5 and truth[: len(parent)] == parent
                tree.add((*parent, truth[len(parent)] if follow else int(generator.integers(vocabulary))))
        committed = commit_of(frozenset(tree), truth)
        assert committed == truth[: len(committed)]
        assert committed[:-1] == () or committed[:-1] in tree
        assert len(committed) == len(truth) or committed not in tree


def test_speculation_over_a_toy_target_commits_the_tokens_of_plain_decoding() -> None:
    """A target that is a table over its last two tokens; random trees; every seed and temperature."""
    generator = np.random.default_rng(2)
    vocabulary, length = 7, 40
    table = generator.normal(0, 2, (vocabulary, vocabulary, vocabulary)).astype(np.float32)

    for seed, temperature in itertools.product(range(12), (0.0, 0.6, 1.0)):
        contract = Contract(seed=seed, max_tokens=length, temperature=temperature, top_k=5, top_p=0.95)

        def choice_after(history: list[int], contract: Contract = contract) -> Choice:
            return Sampler(contract, vocabulary, history, 2).choose(table[history[-2], history[-1]])

        plain = [0, 1]
        while len(plain) < length:
            plain.append(choice_after(plain).token)
        speculative = [0, 1]
        while len(speculative) < length:
            tree: set[Path] = set()
            for _ in range(30):
                parent = [(), *tree][generator.integers(len(tree) + 1)]
                tree.add((*parent, int(generator.integers(vocabulary))))
            paths, parents, tokens = rows_of(frozenset(tree))
            history = list(speculative)
            walked = walk(parents, tokens, lambda row, h=history, p=paths: choice_after([*h, *p[row]]))
            speculative += [choice.token for choice in walked.choices]
        assert speculative[:length] == plain
