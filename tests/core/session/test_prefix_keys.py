"""Keys of the beginnings of texts: equal for the same beginning of the same tenant, and for no other."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.session.prefix_keys import LENGTHS, pack_keys, prefix_keys, shared_length, unpack_keys

TEXT = [*range(1000)]


def test_lengths_rise_by_at_most_a_half() -> None:
    assert LENGTHS[:7] == (64, 96, 128, 192, 256, 384, 512)
    assert all(1 < later / length <= 1.5 for length, later in pairwise(LENGTHS))


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_the_shared_length_of_two_texts_is_found_down_to_a_minimum(same: int, behind: int) -> None:
    other = [*TEXT[:same], *([2000] * behind)]
    expected = max((length for length in LENGTHS if length <= min(same, len(TEXT))), default=0)
    assert shared_length(prefix_keys(other, "a"), frozenset(prefix_keys(TEXT, "a"))) == expected
    assert shared_length(prefix_keys(other, "a"), frozenset(prefix_keys(TEXT, "b"))) == 0


def test_a_list_and_an_array_have_equal_prefix_keys_even_beyond_16_bits() -> None:
    text = [*range(150_000, 150_100)]
    assert prefix_keys(text, "") == prefix_keys(np.array(text), "")
    assert len(prefix_keys(text, "")) == 2
    assert prefix_keys(text[:63], "") == []
    assert len(prefix_keys([1] * 500_000, "")) == len(LENGTHS)


def test_keys_survive_an_announcement() -> None:
    keys = prefix_keys(TEXT, "a")
    assert unpack_keys(pack_keys(keys)) == frozenset(keys)
    assert unpack_keys(pack_keys([])) == unpack_keys("") == frozenset()


@pytest.mark.parametrize("text", ["abc", "no hex!!", "00ff00", "é"])
def test_a_malformed_announcement_has_no_prefix_keys(text: str) -> None:
    assert unpack_keys(text) == frozenset()
