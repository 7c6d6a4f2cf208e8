"""Repetitions are found wherever they are, go round in loops, and are trusted as far as they turned out right."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.construction.expansion import DrafterFits, candidates
from outrider.core.construction.self_repetition import LONGEST, REMEMBERED, SHORTEST, Hint, Repeat, Repeats

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def slow_find(text: list[int], most: int) -> Repeat | None:
    """The definition, place by place."""
    best: Repeat | None = None
    places = [
        place for place in range(SHORTEST, len(text)) if text[place - SHORTEST : place] == text[len(text) - SHORTEST :]
    ]
    for place in reversed(places[-REMEMBERED:]):
        length = SHORTEST
        while length < min(LONGEST, place) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if best is None or length > best.length:
            followed = list(text[place:])
            while len(followed) < most:
                followed.append(followed[len(followed) - (len(text) - place)])
            best = Repeat(length, followed[:most])
    return best


@given(TEXTS, TEXTS, st.integers(1, 9))
def test_the_longest_and_latest_repetition_is_found(first: list[int], more: list[int], most: int) -> None:
    repeats = Repeats(first)
    repeats.extend(more)
    assert repeats.find(most) == slow_find(first + more, most)


@given(TEXTS, TEXTS, TEXTS, st.integers(1, 9))
def test_repetitions_in_a_prefix_shared_with_another_text_are_kept(
    first: list[int], gone: list[int], more: list[int], most: int
) -> None:
    """The same repetitions are found as if all of it were read anew."""
    repeats, other = Repeats(first + gone), first + more
    repeats.keep(other)
    assert repeats.length in (0, *range(len(first), len(other) + 1))
    repeats.extend(other[repeats.length :])
    assert repeats.find(most) == slow_find(other, most)


def test_a_long_text_whose_end_alone_changes_is_not_read_again() -> None:
    repeats = Repeats(range(10_000))
    repeats.keep([*range(9_990), 7, 7])
    assert repeats.length == 9_990


def test_a_loop_is_repeated_up_to_the_requested_length() -> None:
    assert Repeats([7, 1, 2, 3, 1, 2, 3]).find(8) == Repeat(3, [1, 2, 3, 1, 2, 3, 1, 2])


def test_a_repetition_is_trusted_only_if_it_beats_the_model() -> None:
    row = candidates(np.array([4.0, 1.0, 0.0, 0.0]))
    hint = Hint(1, 6)
    right, wrong = DrafterFits(), DrafterFits()
    before = dict(right.edges(row, 4, hint))
    for _ in range(20):
        right.observe(row, 1, hint)
        wrong.observe(row, 0, hint)
    assert max(dict(right.edges(row, 4, hint)).items(), key=lambda item: item[1])[0] == 1
    assert dict(wrong.edges(row, 4, hint))[1] <= before[1]
    assert max(dict(wrong.edges(row, 4, hint)).items(), key=lambda item: item[1])[0] == 0


def test_a_model_that_is_confidently_wrong_is_overruled_and_keeps_proposing() -> None:
    """Its scores are as far apart as at a low temperature; then a row comes in which they are not."""
    fits, hint = DrafterFits(), Hint(1, 6)
    for _ in range(4000):
        fits.observe(candidates(np.array([0.0, -4000.0])), 1, hint)
    for scores in ([0.0, -4000.0], [0.0, -1.0]):
        assert fits.edges(candidates(np.array(scores)), 2, hint)[0] == (1, 0.0)


def test_a_model_that_is_always_right_is_never_overruled() -> None:
    """Agreement must not make repetitions look better than the model."""
    fits = DrafterFits()
    agreed = candidates(np.array([1.0, 0.9, 0.0]))
    for _ in range(50):
        fits.observe(agreed, 0, Hint(0, 12))
    other = candidates(np.array([1.0, 0.9, 0.0]))
    assert fits.edges(other, 1, Hint(1, 12))[0][0] == 0
