"""A slot keeps the KV of the session that left it, and goes to a session that can use it."""

import pytest

from outrider.core.session.prefix_keys import MAX_KEYS, prefix_keys
from outrider.engine.kv.kv_slots import AcquiredSlot, KvSlots
from outrider.errors import Overloaded

STORY = list(range(100, 140))


def test_a_returning_session_finds_its_kv_except_the_last_token() -> None:
    slots = KvSlots(3)
    first = slots.acquire(STORY, "a")
    assert first.cached == 0
    slots.release(first.slot, STORY, "a")
    assert slots.acquire([*STORY, 1, 2], "a") == AcquiredSlot(first.slot, len(STORY), None)
    slots.release(first.slot, STORY, "a")
    assert slots.acquire(STORY, "a") == AcquiredSlot(first.slot, len(STORY) - 1, None)


def test_another_tenant_gets_no_cached_rows() -> None:
    slots = KvSlots(1)
    slots.release(slots.acquire(STORY, "a").slot, STORY, "a")
    assert slots.acquire(STORY, "b").cached == 0


def test_a_fork_copies_the_shared_prefix_and_leaves_the_rest_where_it_is() -> None:
    slots = KvSlots(2)
    old = slots.acquire(STORY, "a").slot
    slots.release(old, STORY, "a")
    fork = slots.acquire([*STORY[:20], 7, 8, 9], "a")
    assert (fork.cached, fork.source) == (20, old)
    assert fork.slot != old
    assert slots.acquire([*STORY, 5], "a").cached == len(STORY)


def test_a_session_whose_log_is_behind_its_kv_takes_its_own_slot_and_leaves_no_copy() -> None:
    slots = KvSlots(2)
    mine = slots.acquire(STORY, "a", "s").slot
    slots.release(mine, STORY, "a", "s")
    assert slots.acquire([*STORY[:20], 7], "a", "s") == AcquiredSlot(mine, 20, None)


def test_a_fork_takes_over_the_slot_when_no_other_is_free() -> None:
    slots = KvSlots(1)
    slots.release(slots.acquire(STORY, "a").slot, STORY, "a")
    assert slots.acquire([*STORY[:20], 7], "a") == AcquiredSlot(0, 20, None)


def test_the_least_recently_used_slot_is_evicted_after_empty_ones() -> None:
    slots = KvSlots(3)
    texts = [[number * 100 + index for index in range(20)] for number in range(3)]
    places = [slots.acquire(text, "a").slot for text in texts]
    for place, text in zip(places[:2], texts[:2], strict=True):
        slots.release(place, text, "a")
    slots.release(places[2], [], "a")
    assert slots.warm == 2
    assert slots.acquire([9] * 20, "a").slot == places[2]
    assert slots.acquire([8] * 20, "a").slot == places[0]
    assert slots.acquire([*texts[1], 1], "a").cached == 20


def test_a_request_without_a_free_slot_is_overloaded() -> None:
    slots = KvSlots(1)
    slots.acquire([1], "")
    with pytest.raises(Overloaded, match="all 1 slots"):
        slots.acquire([1], "")


def test_replacing_the_model_discards_all_cached_kv() -> None:
    slots = KvSlots(2)
    slots.release(slots.acquire(STORY, "a", "s").slot, STORY, "a", "s")
    slots.clear()
    assert (slots.warm, slots.free) == (0, 2)
    assert slots.acquire(STORY, "a", "s").cached == 0


def test_a_prompt_begins_with_the_computed_prefix_of_a_running_session() -> None:
    slots = KvSlots(3)
    running = slots.acquire(STORY, "a").slot
    assert slots.acquire([*STORY, 1], "a").cached == 0  # nothing of it is computed yet
    slots.mark_computed(running, 30)
    place = slots.acquire([*STORY, 2], "a")
    assert (place.cached, place.source) == (30, running)
    assert place.slot != running


def test_only_its_tenant_shares_the_common_prefix_of_a_running_session() -> None:
    slots = KvSlots(4)
    running = slots.acquire(STORY, "a").slot
    slots.mark_computed(running, 200)  # its answer, too
    assert slots.acquire([*STORY[:20], 7, 8], "b").cached == 0
    assert slots.acquire([*STORY[:7], 7, 8], "a").cached == 0
    assert slots.acquire([*STORY[:20], 7, 8], "a")[1:] == (20, running)


def test_a_free_slot_that_holds_as_much_is_taken_itself() -> None:
    slots = KvSlots(2)
    running, free = (slots.acquire(STORY, "a").slot for _ in range(2))
    slots.mark_computed(running, len(STORY))
    slots.release(free, STORY, "a")
    assert slots.acquire([*STORY, 5], "a") == AcquiredSlot(free, len(STORY), None)


def test_a_cleared_or_released_slot_is_no_prefix_of_a_session() -> None:
    slots = KvSlots(3)
    first, second = (slots.acquire(STORY, "a").slot for _ in range(2))
    slots.mark_computed(first, 30)
    slots.clear()
    slots.release(second, [], "a")
    assert slots.acquire([*STORY, 1], "a").cached == 0
    slots.release(first, [], "a")
    assert slots.acquire([*STORY, 1], "a").cached == 0


def test_a_running_session_of_an_engine_without_rewind_is_not_shared() -> None:
    slots = KvSlots(2, rewinds=False)
    slots.mark_computed(slots.acquire(STORY, "a").slot, 20)
    assert slots.acquire([*STORY, 1], "a").cached == 0


LONG = [*range(1000, 1200)]


def test_slots_announce_keys_of_shareable_texts_the_latest_first() -> None:
    slots = KvSlots(3)
    old, other = [*range(70)], [*range(500, 600)]
    slots.release(slots.acquire(old, "a").slot, old, "a")
    slots.release(slots.acquire(other, "b").slot, other, "b")
    running = slots.acquire(LONG, "a").slot
    assert slots.keys() == [*prefix_keys(other, "b"), *prefix_keys(old, "a")]  # nothing of it is computed yet
    slots.mark_computed(running, 100)
    assert slots.keys() == [*prefix_keys(LONG[:100], "a"), *prefix_keys(other, "b"), *prefix_keys(old, "a")]
    assert slots.evict() is not None  # the oldest
    assert slots.keys() == [*prefix_keys(LONG[:100], "a"), *prefix_keys(other, "b")]
    slots.clear()
    assert slots.keys() == []


def test_a_shared_prefix_has_one_key_and_the_number_of_keys_is_bounded() -> None:
    slots = KvSlots(200)
    for number in range(200):
        place = slots.acquire([*LONG, *([5000 + number] * 200)], "a")
        slots.mark_computed(place.slot, 400)
    keys = slots.keys()
    assert len(keys) == len(set(keys)) == MAX_KEYS
    assert set(prefix_keys(LONG, "a")) < set(keys)


def test_slots_of_an_engine_without_rewind_announce_no_keys() -> None:
    slots = KvSlots(2, rewinds=False)
    slots.release(slots.acquire(LONG, "a").slot, LONG, "a")
    assert slots.keys() == []
