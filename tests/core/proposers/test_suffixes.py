"""The index finds what a search from end to end finds, forgets without a trace, and claims what comes true."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.proposers.ngram_tree import NOTHING, Continuation
from outrider.core.proposers.suffix_trie import LONGEST, SuffixTrie
from outrider.core.proposers.suffixes import PIECE, PLACES, FinishedOutputs, SessionSuffixes, TenantOutputs

TEXT = st.lists(st.integers(0, 2), max_size=40)
TEXTS = st.lists(TEXT, min_size=1, max_size=6)


def tree_of(documents: Sequence[Sequence[int]]) -> SuffixTrie:
    """The last document goes on."""
    tree = SuffixTrie()
    for number, document in enumerate(documents):
        if number:
            tree.separate()
        tree.extend(document)
    tree.check_integrity()
    return tree


def slow_matches(documents: Sequence[Sequence[int]], end: Sequence[int], shortest: int = 1) -> list[tuple[int, int]]:
    """The definition, place by place."""
    found = []
    first = 1  # position of a document's first token
    for document in documents:
        for index in range(1, len(document)):
            length = 0
            while length < min(index, LONGEST, len(end)) and document[index - 1 - length] == end[-1 - length]:
                length += 1
            if length >= shortest:
                found.append((length, first + index))
        first += len(document) + 1
    return sorted(found, reverse=True)


def markov(length: int, seed: int, order: int) -> list[int]:
    """A text of 8 tokens, each drawn by the ones before it, some choices clear and some not."""
    rng = random.Random(seed)
    weights: dict[tuple[int, ...], list[float]] = {}
    text = [rng.randrange(8) for _ in range(order)]
    for _ in range(length):
        before = tuple(text[-order:])
        if before not in weights:
            weights[before] = [rng.expovariate(1.0) ** 3 for _ in range(8)]
        text += rng.choices(range(8), weights[before])
    return text


@given(TEXTS, TEXT, st.integers(1, 4))
def test_every_match_is_found_with_its_length(documents: list[list[int]], end: list[int], shortest: int) -> None:
    tree = tree_of(documents)
    for query in (end, documents[-1], documents[-1] + end):
        assert list(tree.matches(query, shortest)) == slow_matches(documents, query, shortest)


@given(TEXTS, TEXT, st.data())
def test_an_index_that_forgot_documents_equals_one_over_the_rest(
    documents: list[list[int]], end: list[int], data: st.DataObject
) -> None:
    tree = tree_of(documents)
    gone = 0
    while len(documents) > 1 and data.draw(st.booleans()):
        gone += len(documents[0]) + 1
        tree.drop(len(documents.pop(0)) + 1)
    tree.check_integrity()
    fresh = tree_of(documents)
    for query in (end, documents[-1], documents[0] + end):
        places = [(length, place - gone) for length, place in tree.matches(query)]
        assert places == list(fresh.matches(query)) == slow_matches(documents, query)
        for _, place in places:
            assert list(tree.follow(place + gone, 9)) == list(fresh.follow(place, 9))


def test_documents_may_be_added_and_forgotten_without_end() -> None:
    rng = random.Random(5)
    tree, documents, gone = SuffixTrie(), [], 0
    for _ in range(300):
        documents.append([rng.randrange(3) for _ in range(rng.randrange(1, 30))])
        tree.extend(documents[-1])
        tree.separate()
        while len(documents) > 5:
            gone += len(documents[0]) + 1
            tree.drop(len(documents.pop(0)) + 1)
    tree.check_integrity()
    end = documents[2][:9]
    assert [(length, place - gone) for length, place in tree.matches(end)] == slow_matches(documents, end)


def test_suffixes_propose_nothing_across_two_documents() -> None:
    tree = tree_of([[1, 2, 3], [3, 4, 5], [9]])
    assert list(tree.follow(2, 9)) == [2, 3]
    assert list(tree.matches([2, 3, 3])) == [(1, 6)]


def test_a_looping_text_is_followed_round_its_loop() -> None:
    tree = tree_of([[7, 1, 2, 3, 1]])
    assert next(tree.matches([1])) == (1, 3)
    assert list(tree.follow(3, 8)) == [2, 3, 1, 2, 3, 1, 2, 3]
    tree.separate()
    assert list(tree.follow(3, 8)) == [2, 3, 1]


def slow_paths(text: Sequence[int], end: Sequence[int], depth: int) -> set[tuple[int, ...]]:
    """All paths that lead on from the places that count, as far as the text goes."""
    places = [place - 1 for _, place in slow_matches([text], end)[:PLACES]]  # indices into the text
    return {tuple(text[at : at + length]) for at in places for length in range(1, min(depth, len(text) - at) + 1)}


@given(TEXT, TEXT)
def test_suffixes_propose_the_continuations_of_the_longest_matches(text: list[int], end: list[int]) -> None:
    proposal = SessionSuffixes(text).propose(end, 500, 3)
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(proposal.parents, proposal.tokens, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    matches = slow_matches([text], end)
    assert proposal.matched == (matches[0][0] if matches else 0)
    assert slow_paths(text, end, 3) <= set(paths)
    assert slow_paths(text, end, 1) == {path for path in paths if len(path) == 1}


def test_the_more_frequent_continuation_of_a_match_leads() -> None:
    index = SessionSuffixes([*[5, 6, 1, 9], *[5, 6, 2, 9] * 3, 5, 6])
    proposal = index.propose([5, 6], 2, 1)
    assert proposal.tokens == (2, 1)
    assert proposal.chances[0] > 2 * proposal.chances[1]


def test_a_longer_match_outweighs_several_shorter_ones() -> None:
    long = list(range(10, 22))
    index = SessionSuffixes([*long, 1, *[8, 21, 2] * 2, *long])
    assert index.propose(long, 1, 1).tokens == (1,)
    assert index.propose(long, 1, 1).matched == len(long)


@given(TEXT, TEXT, st.integers(1, 9), st.integers(1, 5))
def test_a_proposal_keeps_to_its_bounds(text: list[int], end: list[int], nodes: int, depth: int) -> None:
    proposal = SessionSuffixes(text).propose(end, nodes, depth)
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    assert len(depths) <= nodes
    assert max(depths, default=0) <= depth


@pytest.mark.parametrize("order", [1, 2])
def test_suffix_chances_come_true(order: int) -> None:
    """Within a tenth in every class of claims, at the first depth and below it."""
    claimed: dict[tuple[int, bool], list[tuple[float, bool]]] = {}
    for seed in range(2):
        text = markov(4000, seed, order)
        index = SessionSuffixes()
        for at, token in enumerate(text[:-3]):
            if at > len(text) // 2 and at % 4 == 0:
                depths: list[int] = []
                true: list[bool] = []
                proposal = index.propose(text[at - LONGEST : at], 8, 3)
                for parent, proposed, chance in zip(proposal.parents, proposal.tokens, proposal.chances, strict=True):
                    reached = parent < 0 or true[parent]
                    depths.append(depths[parent] + 1 if parent >= 0 else 0)
                    true.append(reached and text[at + depths[-1]] == proposed)
                    if reached:
                        claimed.setdefault((int(chance * 5), depths[-1] > 0), []).append((chance, true[-1]))
            index.extend([token])
    classes = [claims for claims in claimed.values() if len(claims) >= 150]
    assert len(classes) >= 6
    for claims in classes:
        chances, hits = zip(*claims, strict=True)
        assert sum(chances) / len(claims) == pytest.approx(sum(hits) / len(claims), abs=0.1)


def test_text_without_any_order_is_hardly_trusted() -> None:
    rng = random.Random(3)
    index = SessionSuffixes()
    for _ in range(250):
        index.extend([rng.randrange(50) for _ in range(8)])
    claims = [index.propose([rng.randrange(50) for _ in range(9)], 8, 8).expected for _ in range(100)]
    assert sum(claims) / len(claims) < 0.5


OUTPUTS = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [2, 3, 8]]


def test_the_latest_finished_output_is_proposed_first() -> None:
    outputs = FinishedOutputs()
    assert outputs.propose([2, 3], 8, 8) == NOTHING
    for output in OUTPUTS:
        outputs.add(output)
    proposal = outputs.propose([1, 2, 3], 2, 1)
    assert proposal.matched == 3
    assert proposal.tokens == (6, 4)
    assert set(outputs.propose([2, 3], 9, 1).tokens) == {4, 6, 8}


def test_the_oldest_outputs_leave_a_full_store() -> None:
    outputs = FinishedOutputs(capacity=10)
    for output in OUTPUTS:
        outputs.add(output)
    assert outputs.tokens == 8
    assert 4 not in outputs.propose([1, 2, 3], 9, 9).tokens
    outputs.add(range(100, 130))
    assert outputs.tokens == 10
    assert outputs.propose([2, 3], 9, 9) == NOTHING
    assert outputs.propose([120], 2, 9).tokens == (121, 122)
    outputs.add([])
    assert outputs.tokens == 10


def test_outputs_without_capacity_keep_nothing() -> None:
    outputs = FinishedOutputs(capacity=0)
    outputs.add([1, 2, 3])
    assert outputs.propose([1, 2], 9, 9) == NOTHING


def test_many_finished_outputs_take_bounded_memory() -> None:
    """Held: branches and places of the trie, and entries of its window."""
    rng = random.Random(7)
    outputs = FinishedOutputs(capacity=500)
    for _ in range(400):
        outputs.add([rng.randrange(20) for _ in range(rng.randrange(1, 60))])
        assert outputs.tokens <= 500
    tree = outputs._contexts
    tree.check_integrity()
    assert len(tree._text) <= 2.5 * 500
    nodes, stack = 0, [tree._root]
    while stack:
        nodes += 1
        children = stack.pop().children.values()
        stack += [child for child in children if not isinstance(child, int)]
        nodes += sum(isinstance(child, int) for child in children)
    assert nodes <= 2 * 500


def test_an_output_is_trusted_by_how_well_the_others_predict_it() -> None:
    """An output that repeats itself alone does not make the others more credible."""
    alike, alone = FinishedOutputs(), FinishedOutputs()
    rng = random.Random(1)
    again = [rng.randrange(1000) for _ in range(50)]
    for turn in range(20):
        alike.add(again)
        alone.add([1000 + 10 * turn + index % 10 for index in range(50)])
    alone.add(again)
    end, follows = again[:20], tuple(again[20:24])
    trusted, not_so = alike.propose(end, 4, 4), alone.propose(end, 4, 4)
    assert trusted.tokens == not_so.tokens == follows
    assert trusted.chances[0] > 0.95
    assert not_so.chances[0] < 0.9


def test_outputs_that_are_wrong_about_a_text_are_trusted_less() -> None:
    outputs = FinishedOutputs()
    outputs.add([1, 2, 3])
    before = outputs.propose([1, 2], 1, 1).chances[0]
    for _ in range(50):
        outputs.learn([1, 2], 5)
    assert outputs.propose([1, 2], 1, 1).chances[0] < 0.1 < before


def test_tenants_never_see_one_anothers_outputs() -> None:
    tenants = TenantOutputs(capacity=100, tenants=2)
    tenants.of("a").add([1, 2, 3])
    assert tenants.of("b").propose([1, 2], 4, 4) == NOTHING
    assert tenants.of("a").propose([1, 2], 4, 4).tokens == (3,)


def test_the_tenant_that_asked_the_longest_ago_is_forgotten() -> None:
    tenants = TenantOutputs(capacity=100, tenants=2)
    for tenant in ("a", "b", "a", "c"):
        tenants.of(tenant).add([1, 2, 3])
    assert tenants.of("a").propose([1, 2], 4, 4) != NOTHING
    assert tenants.of("b").propose([1, 2], 4, 4) == NOTHING


def test_an_empty_text_proposes_nothing() -> None:
    assert SessionSuffixes().propose([], 4, 4) == Continuation()
    assert SessionSuffixes([1, 2, 1, 2]).propose([], 4, 4) == NOTHING


def test_a_long_output_is_kept_piece_by_piece_while_sessions_learn() -> None:
    outputs, output = FinishedOutputs(capacity=4 * PIECE), [*range(1, 3 * PIECE + 11)]
    outputs.add(output)
    assert outputs.tokens == PIECE
    assert outputs.propose(output[PIECE : PIECE + 4], 1, 1).tokens == ()
    for _ in range(2):
        outputs.learn([0], 0)
    assert outputs.tokens == 3 * PIECE
    assert outputs.propose(output[PIECE : PIECE + 4], 1, 1).tokens == (output[PIECE + 4],)
    for _ in range(5):
        outputs.add(output)
    for _ in range(30):
        outputs.learn([0], 0)
        assert outputs.tokens <= outputs.capacity
    outputs._contexts.check_integrity()
