"""Where drafters of several tiers go."""

from outrider.store.registry import TOP, Worker
from router.placement import place


def worker(name: str, tier: int = 0, above: int | None = None, *, serves: bool = True) -> Worker:
    upper = tier - 1 if above is None else above
    return Worker(name, "drafter", name, "m", b"", 10, 10, 8, 0, 0, tier=tier, above=upper, serves=serves)


VERIFIER = Worker("v", "verifier", "v", "m", b"", 10, 10, 8, 0, 0)


def placed(*drafters: Worker, each: int = 1, keep: tuple[str, ...] = ()) -> dict[str, str]:
    places = place(VERIFIER, drafters, {drafter.tier: each for drafter in drafters}, keep)
    return {drafter.worker_id: upstream.worker_id for drafter, upstream in places}


def test_each_tier_drafts_for_the_one_above() -> None:
    assert worker("a").above == TOP
    assert placed(worker("c", 2), worker("a"), worker("b", 1)) == {"a": "v", "b": "a", "c": "b"}


def test_a_tier_may_draft_for_another_than_the_next() -> None:
    assert placed(worker("a"), worker("b", 1), worker("c", 2, 0)) == {"a": "v", "b": "a", "c": "a"}


def test_a_tier_of_which_nobody_is_there_is_skipped() -> None:
    assert placed(worker("a"), worker("c", 2)) == {"a": "v", "c": "a"}
    assert placed(worker("c", 2)) == {"c": "v"}
    assert placed(worker("b", 1), worker("d", 3, 0)) == {"b": "v", "d": "v"}


def test_nobody_drafts_for_who_cannot_judge_it() -> None:
    assert placed(worker("a"), worker("b", 1, serves=False), worker("c", 2)) == {"a": "v", "b": "a", "c": "a"}


def test_of_each_tier_so_many_and_who_is_there_stays() -> None:
    many = [worker(name) for name in "abc"] + [worker(name, 1) for name in "xyz"]
    assert placed(*many) == {"a": "v", "x": "a"}
    assert placed(*many, each=2) == {"a": "v", "b": "v", "x": "a", "y": "a"}
    assert placed(*many, keep=("c", "z")) == {"c": "v", "z": "c"}
    assert placed(*many, each=0) == {}
