"""Tiers draft while they are measured to pay; trees take judgements from other tiers."""

import math
import random
from itertools import combinations, pairwise

import pytest

from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import InvalidRequest

BOTH, UPPER, LOWER = frozenset({0, 1}), frozenset({0}), frozenset({1})
THREE = frozenset({0, 1, 2})


def stretches(choice: TierSwitch, speeds: dict[frozenset[int], float], count: int) -> list[frozenset[int]]:
    """The tiers of each of `count` stretches of two seconds."""
    used = []
    for _ in range(count):
        now = choice.wanted(BOTH, greedy=False)
        choice.observe(BOTH, False, now, round(2 * speeds[now]), 2.0)
        used.append(now)
    return used


def settle(speeds: dict[frozenset[int], float], noise: random.Random) -> tuple[frozenset[int], int]:
    """The tiers that draft after the heats, and the number of windows until then. A window's tokens are noisy."""
    choice = TierSwitch()
    windows = 0
    choice.wanted(THREE, greedy=False)
    while (seconds := choice.window_s(THREE, greedy=False)) < 1.0:
        now = choice.wanted(THREE, greedy=False)
        choice.observe(THREE, False, now, round(speeds[now] * seconds * noise.gauss(1.0, 0.1)), seconds)
        windows += 1
    return choice.wanted(THREE, greedy=False), windows


def test_three_tiers_are_settled_after_ten_windows() -> None:
    sets = [frozenset(some) for size in (1, 2, 3) for some in combinations(range(3), size)]
    noise = random.Random(7)
    for best in sets * 20:
        speeds = {each: noise.uniform(20.0, 60.0) for each in sets} | {best: 90.0}
        chosen, windows = settle(speeds, noise)
        assert chosen == best
        assert len(sets) <= windows <= len(sets) + 3


def test_a_fast_set_is_chosen_among_similar_sets_of_tiers() -> None:
    sets = [frozenset(some) for size in (1, 2, 3) for some in combinations(range(3), size)]
    noise = random.Random(7)
    slow = {each: 40.0 for each in sets if 2 in each}
    settled = [settle(dict.fromkeys(sets, 60.0) | slow, noise) for _ in range(100)]
    assert sum(2 in chosen for chosen, _ in settled) <= 2
    assert {windows for _, windows in settled} <= {7, 9, 10}
    assert sum(windows > 7 for _, windows in settled) > 80  # among equal tiers the fastest have another heat


@pytest.mark.parametrize("best", [BOTH, UPPER, LOWER])
def test_the_fastest_tiers_stay_and_the_useless_are_left_out(best: frozenset[int]) -> None:
    choice = TierSwitch()
    used = stretches(choice, dict.fromkeys((BOTH, UPPER, LOWER), 50.0) | {best: 70.0}, 2000)
    assert used[:3] == [BOTH, UPPER, LOWER]
    assert set(used[:30]) == {BOTH, UPPER, LOWER}
    assert sum(now == best for now in used[1000:]) > 900


def test_greedy_generations_and_other_tiers_are_on_their_own() -> None:
    choice = TierSwitch()
    stretches(choice, {BOTH: 50.0, UPPER: 70.0, LOWER: 10.0}, 100)
    assert choice.wanted(BOTH, greedy=True) == BOTH
    assert choice.wanted(THREE, greedy=False) == {1, 2}
    assert choice.wanted(UPPER, greedy=False) == UPPER


def test_drafts_of_tiers_that_are_not_on_trial_do_not_count() -> None:
    choice = TierSwitch()
    assert choice.wanted(BOTH, greedy=False) == BOTH
    for _ in range(100):
        choice.observe(BOTH, False, UPPER, 1000, 1.0)
        choice.observe(BOTH, False, BOTH, 0, 0.0)
    assert choice.wanted(BOTH, greedy=False) == BOTH


def heat(choice: TierSwitch, speed: float, *, rested: bool = False) -> frozenset[int]:
    """Measure a window of the three tiers' heat, and return the set that it was measured for."""
    now = choice.wanted(THREE, greedy=False)
    choice.observe(THREE, False, now, round(10 * speed), 10.0, rested=rested)
    return now


def test_a_set_slower_than_plain_decoding_ends_the_trials_if_another_set_pays() -> None:
    choice = TierSwitch()
    assert [heat(choice, speed) for speed in (40.0, 60.0)] == [{1, 2}, {1}]
    assert heat(choice, 30.0, rested=True) == THREE
    assert choice.estimates()[0]["settled"]
    assert choice.wanted(THREE, greedy=False) == {1}
    tried = [heat(choice, 60.0) for _ in range(200)]
    assert set(tried) == {frozenset(some) for size in (1, 2, 3) for some in combinations(range(3), size)}


def test_sets_with_another_first_tier_are_tried_when_none_pays() -> None:
    choice = TierSwitch()
    tried = []
    while not (choice.estimates() and choice.estimates()[0]["settled"]):
        tried.append(heat(choice, 30.0, rested=True))
    assert tried[:3] == [{1, 2}, {0, 1, 2}, {2}]


def test_plain_decoding_counts_while_a_set_is_tried() -> None:
    choice = TierSwitch()
    assert choice.long_rest_s(BOTH, greedy=False) == math.inf  # not asked for yet
    choice.wanted(BOTH, greedy=False)
    assert choice.long_rest_s(BOTH, greedy=False) == choice.window_s(BOTH, greedy=False)
    for _ in range(100):
        (now,) = stretches(choice, {BOTH: 50.0, UPPER: 70.0, LOWER: 10.0}, 1)
        following = choice.wanted(BOTH, greedy=False)
        if now == following == UPPER and choice.estimates()[0]["settled"]:
            assert choice.long_rest_s(BOTH, greedy=False) == math.inf
        else:
            assert following == UPPER or choice.long_rest_s(BOTH, greedy=False) < math.inf


def chain(
    tokens: list[int], first_id: int, *, edge: float = -0.5, root: TokenTree | None = None, **more: object
) -> Delta:
    tree = root or TokenTree([1])
    ids = range(first_id, first_id + len(tokens))
    parents = (0, *(before for before, _ in pairwise(ids))) if tokens else ()
    terms: dict[str, object] = {"parents": parents, "tokens": tuple(tokens), "edges": (edge,) * len(tokens)}
    return Delta(tree.root.position, tree.digest, first_id, **(terms | more))  # type: ignore[arg-type]


def test_a_later_judgement_replaces_an_earlier_one_in_either_direction() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain([5, 6], 1))
    five = tree.root.children[5]
    six = five.children[6]
    tree.graft(1, chain([], 3, rescored=((1, -2.0), (2, -0.25)), version=1))
    assert (five.edge, six.edge) == (-2.0, -0.25)
    assert tree.score(six) == pytest.approx(math.exp(-2.25))
    tree.graft(1, chain([], 3, rescored=((1, -1.0),), version=1))  # a replay
    assert five.edge == -2.0
    tree.graft(1, chain([], 3, rescored=((1, -1.0),), version=2))
    assert five.edge == -1.0
    tree.check_integrity()


def test_the_larger_judgement_of_two_drafters_counts() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain([5], 1, edge=-0.5))
    tree.graft(2, chain([5], 1, edge=-1.0))
    five = tree.root.children[5]
    tree.graft(2, chain([], 2, rescored=((1, -2.0),), version=1))
    assert five.edge == -0.5
    tree.graft(3, chain([5], 1, edge=-1.0))
    tree.graft(3, chain([], 2, rescored=((1, -0.5),), version=1))
    assert five.claim == (1, -0.5)  # of two alike the first
    tree.graft(2, chain([], 2, rescored=((1, -0.25),), version=2))
    assert five.edge == -0.25


def test_a_judgement_of_a_removed_node_is_ignored_and_of_an_unsent_one_refused() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain([5, 6], 1))
    tree.commit([5])
    tree.graft(1, chain([], 3, rescored=((1, -2.0), (2, -0.25)), version=1, root=tree))
    assert tree.root.children[6].edge == -0.25
    with pytest.raises(InvalidRequest, match="rescored"):
        tree.graft(1, chain([], 3, rescored=((7, -2.0),), version=2, root=tree))


def test_a_node_is_credited_to_its_drafter_and_not_to_its_relay() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain([5, 6], 1), origin=9)
    tree.graft(1, chain([5], 3))
    five = tree.root.children[5]
    assert (tree.ids.origins(five), tree.ids.origins(five.children[6])) == ({1, 9}, {9})
    tree.commit([5])
    assert tree.ids.origins(tree.root.children[6]) == {9}


def test_hints_raise_lower_and_add_and_under_another_root_change_nothing() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain([5, 6], 1))
    tree.hint(Hints(3, (-1,), (5,), (-4.0,)))
    assert tree.root.children[5].edge == -0.5
    tree.hint(Hints(0, (-1, 0, 0, -1), (5, 6, 7, 8), (-2.0, -0.25, -0.5, -1.0)))
    five = tree.root.children[5]
    edges = [node.edge for node in (five, *five.children.values(), tree.root.children[8])]
    assert edges == [-2.0, -0.25, -0.5, -1.0]
    assert all(node.rescored for node in (five, *five.children.values()))
    tree.check_integrity()
    tree.commit([5])
    tree.hint(Hints(0, (-1,), (6,), (-4.0,)))  # of the root before
    assert tree.root.children[6].edge == -0.25


def test_hints_never_fill_a_tree_beyond_its_capacity() -> None:
    tree = TokenTree([1], capacity=20)
    rng = random.Random(2)
    count = 100
    parents = tuple(rng.randrange(-1, index) for index in range(count))
    tree.hint(Hints(0, parents, tuple(rng.randrange(50) for _ in range(count)), (-0.5,) * count))
    assert tree.size == 20
    tree.check_integrity()


def test_a_drafter_continues_its_ids_in_another_tree() -> None:
    tree = TokenTree([1])
    tree.ids.of(1).resume(40)
    assert not tree.graft(1, chain([5], 40)).added
    assert not tree.graft(1, chain([6], 41, parents=(12,))).added  # below a node that the other tree held
    assert len(tree.graft(1, chain([5], 42)).added) == 1
