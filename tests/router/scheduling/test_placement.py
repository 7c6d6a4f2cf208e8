"""Where sessions go, and drafters of several tiers."""

from outrider.store.registry import TOP, Worker
from router.scheduling.placement import VerifierCandidate, order_candidates, place_drafters, should_rebalance


def worker(name: str, tier: int = 0, above: int | None = None, *, serves: bool = True) -> Worker:
    upper = tier - 1 if above is None else above
    return Worker(name, "drafter", name, "m", b"", 10, 10, 8, 0, 0, tier=tier, above=upper, serves=serves)


VERIFIER = Worker("v", "verifier", "v", "m", b"", 10, 10, 8, 0, 0)


def placed(*drafters: Worker, each: int = 1, keep: tuple[str, ...] = ()) -> dict[str, str]:
    places = place_drafters(VERIFIER, drafters, {drafter.tier: each for drafter in drafters}, keep)
    return {drafter.worker_id: upstream.worker_id for drafter, upstream in places}


def test_each_tier_drafts_for_the_one_above() -> None:
    assert worker("a").above == TOP
    assert placed(worker("c", 2), worker("a"), worker("b", 1)) == {"a": "v", "b": "a", "c": "b"}


def test_a_tier_may_draft_for_another_than_the_next() -> None:
    assert placed(worker("a"), worker("b", 1), worker("c", 2, 0)) == {"a": "v", "b": "a", "c": "a"}


def test_a_tier_without_drafters_is_skipped() -> None:
    assert placed(worker("a"), worker("c", 2)) == {"a": "v", "c": "a"}
    assert placed(worker("c", 2)) == {"c": "v"}
    assert placed(worker("b", 1), worker("d", 3, 0)) == {"b": "v", "d": "v"}


def test_no_drafter_drafts_for_a_tier_that_cannot_judge_its_nodes() -> None:
    assert placed(worker("a"), worker("b", 1, serves=False), worker("c", 2)) == {"a": "v", "b": "a", "c": "a"}


def test_each_tier_has_its_number_of_drafters_and_keeps_attached_ones() -> None:
    many = [worker(name) for name in "abc"] + [worker(name, 1) for name in "xyz"]
    assert placed(*many) == {"a": "v", "x": "a"}
    assert placed(*many, each=2) == {"a": "v", "b": "v", "x": "a", "y": "a"}
    assert placed(*many, keep=("c", "z")) == {"c": "v", "z": "c"}
    assert placed(*many, each=0) == {}


def prospect(
    name: str, load: float = 0.0, *, prefill: float = 1000.0, wait_s: float = 0.0, shared: int = 0, **known: bool
) -> VerifierCandidate:
    verifier = Worker(name, "verifier", name, "m", b"", 10, 10, 8, 0, 0, prefill=prefill)
    stands = {"suspected": False, "holds": False, "full": False, "near": True} | known
    return VerifierCandidate(verifier, load=load, wait_s=wait_s, shared=shared, **stands)


def order(*prospects: VerifierCandidate, tokens: int = 100) -> str:
    return "".join(worker.worker_id for worker in order_candidates(prospects, tokens))


def test_a_session_goes_to_its_kv_then_to_the_least_loaded_nearby_verifier() -> None:
    assert order(prospect("a", 0.5), prospect("b", 0.2), prospect("c", 0.9, holds=True)) == "cba"
    assert order(prospect("a", 0.1, near=False), prospect("b", 0.3)) == "ba"
    assert order(prospect("a", 0.1, near=False), prospect("b", 0.5)) == "ab"


def test_a_shared_prefix_is_worth_an_eighth_of_the_slots() -> None:
    assert order(prospect("a", 0.1), prospect("b", 0.2, shared=96)) == "ba"
    assert order(prospect("a", 0.1), prospect("b", 0.3, shared=96)) == "ab"
    assert order(prospect("a", 0.1), prospect("b", 0.2, shared=64), tokens=1000) == "ab"  # a small part of the text
    assert order(prospect("a"), prospect("b", 0.1, shared=96, full=True)) == "ab"
    assert order(prospect("a"), prospect("b", 0.1, shared=96, suspected=True)) == "ab"
    held = prospect("h", 1.0, holds=True, full=True, wait_s=0.5)
    assert order(held, prospect("a"), tokens=1000) == "ha"  # a prefill elsewhere takes a second
    assert order(held, prospect("a", shared=768), tokens=1000) == "ah"


def test_a_full_verifier_is_waited_for_only_while_reading_elsewhere_takes_longer() -> None:
    held = prospect("h", 1.0, holds=True, full=True, wait_s=2.0)
    assert order(held, prospect("a")) == "ah"  # a tenth of a second for 100 tokens
    assert order(held, prospect("a"), tokens=3000) == "ha"
    busy = prospect("a", 1.0, full=True, wait_s=2.5)
    assert order(held, busy) == "ha"


def test_a_worker_that_failed_recently_is_ranked_last_even_with_the_kv() -> None:
    assert order(prospect("h", holds=True, suspected=True), prospect("a", 0.9), prospect("f", 1.0, full=True)) == "afh"


def test_sessions_that_choose_by_themselves_balance_two_drafters() -> None:
    draws = [index / 100 for index in range(100)]
    for here, there in ((10, 0), (7, 3), (2, 0)):
        moved = here * sum(should_rebalance(here, there, chance) for chance in draws) / len(draws)
        assert abs(moved - (here - there) / 2) <= 0.1
    assert not any(should_rebalance(here, there, 0.0) for here, there in ((0, 0), (1, 0), (4, 4), (3, 5)))
