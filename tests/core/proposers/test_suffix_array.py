"""The suffix array is that of a plain sort, in however many parts it is made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.proposers import suffix_array
from outrider.core.proposers.suffix_array import COMPARED, sorted_suffixes

STOP = 3  # what separates documents, here
TEXTS = st.lists(st.integers(0, STOP), max_size=80).map(lambda text: [*text, STOP])


def slow_suffixes(text: list[int]) -> list[int]:
    """The definition. What is behind the text counts as its last token."""
    padded = text + [text[-1]] * COMPARED
    return sorted(
        (at for at, token in enumerate(text) if token < STOP), key=lambda at: (padded[at : at + COMPARED], at)
    )


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@given(text=TEXTS, part=st.sampled_from([1, 3, 20, 1000]), block=st.sampled_from([7, 1000]))
def test_suffixes_are_sorted_as_by_a_plain_sort(kind: type, text: list[int], part: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_array, "BLOCK", block)
        found = list(sorted_suffixes(np.array(text, dtype=kind), STOP, part=part))
    assert [int(at) for array in found for at in array] == slow_suffixes(text)


def test_large_tokens_are_compared_as_numbers() -> None:
    text = [70_000, 1, 65_537, 2, 100_000]
    assert np.concatenate(list(sorted_suffixes(np.array(text, np.uint32), 100_000))).tolist() == [1, 3, 2, 0]


def test_a_text_of_a_single_token_over_and_over_is_sorted_by_position() -> None:
    """Its suffixes agree in more tokens than are compared."""
    text = np.zeros(5000, dtype=np.uint16)
    text[-1] = 1
    found = np.concatenate(list(sorted_suffixes(text, 1, part=100)))
    assert found.tolist() == [*range(5000 - COMPARED), *range(5000 - COMPARED, 4999)]


def test_suffixes_that_agree_as_far_as_is_compared_stand_by_position() -> None:
    """The same text over and over, as far as no sort keeps their order by chance."""
    text = [*np.random.default_rng(3).integers(0, STOP, 40).tolist() * 50, STOP]
    assert np.concatenate(list(sorted_suffixes(np.array(text, np.uint16), STOP))).tolist() == slow_suffixes(text)


def test_no_part_is_larger_than_asked_for_where_suffixes_differ() -> None:
    text = np.random.default_rng(2).integers(0, 4, 5000).astype(np.uint16)
    sizes = [len(array) for array in sorted_suffixes(text, 4, part=64)]
    assert sum(sizes) == 5000
    assert max(sizes) <= 64
