"""From which contracts other sessions learn."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.control.depth.acceptance_stats import AcceptanceCounts
from outrider.core.session.contract import MAX_FOLDER, Adapter, Contract, StepReport
from outrider.errors import InvalidRequest


def contract(**terms: Any) -> Contract:
    return Contract(**{"seed": 1, "max_tokens": 9, **terms})


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"temperature": 0.0, "top_k": 1, "top_p": 0.01, "min_p": 1.0},  # filters change nothing of greedy decoding
        {"temperature": 1.5, "top_k": 10, "top_p": 0.5, "min_p": 0.3},
        {"top_k": 40, "top_p": 0.9, "stop_ids": (2,), "logprobs": 20, "choice": 7},
        {"min_tokens": 9},  # there is no stop id that it could ban
        {"rule": "traversal-verification"},
    ],
)
def test_usual_contracts_are_representative(terms: dict[str, Any]) -> None:
    assert contract(**terms).representative


@pytest.mark.parametrize(
    "terms",
    [
        {"logit_bias": {3: -100.0}},
        {"allowed_ids": (3,)},
        {"banned_ids": (3,)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1, "stop_ids": (2,)},
        {"top_k": 1},
        {"top_k": 9},
        {"top_p": 0.49},
        {"min_p": 0.31},
        {"temperature": 1.6},
        {"temperature": 0.0, "banned_ids": (3,)},
        {"adapter": Adapter("sql", "0d" * 16)},
        {"rule": "lenient-speculative-sampling", "lenience": 0.1},
        {"rule": "typical-acceptance", "typical_epsilon": 0.0},
    ],
)
def test_contracts_that_decide_the_worth_of_drafts_are_not_representative(terms: dict[str, Any]) -> None:
    assert not contract(**terms).representative


def test_a_non_representative_session_copies_shared_statistics_and_keeps_its_own() -> None:
    shared = AcceptanceCounts()
    report = StepReport(verified=4, accepted=2, verified_depth=3, ranks=b"\0\1")
    contract().own_or_shared(shared).observe(report)
    learned = shared.values()
    assert shared.steps == 1.0
    own = contract(banned_ids=(3,)).own_or_shared(shared)
    assert own.values() == learned
    own.observe(report)
    own.scale(2.0)
    assert own.steps == 4.0
    assert own.values() == [4.0 * value for value in learned]
    assert shared.values() == learned


@pytest.mark.parametrize(
    ("folder", "digest", "field"),
    [
        ("", "0d" * 16, "adapter.folder"),
        ("x" * (MAX_FOLDER + 1), "0d" * 16, "adapter.folder"),
        ("sql", "0d" * 15, "adapter.digest"),
        ("sql", "0D" * 16, "adapter.digest"),
        ("sql", "xy" * 16, "adapter.digest"),
    ],
)
def test_an_adapter_has_a_folder_and_a_digest(folder: str, digest: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Adapter(folder, digest)


def test_kv_is_shared_within_a_tenant_and_an_adapter() -> None:
    adapted = contract(adapter=Adapter("sql", "0d" * 16))
    again = contract(adapter=Adapter("elsewhere", "0d" * 16))  # the same files
    other = contract(adapter=Adapter("sql", "0e" * 16))
    scopes = [it.kv_scope(tenant) for it in (contract(), adapted, again, other) for tenant in ("a", "b")]
    assert len({*scopes}) == 6
    assert adapted.kv_scope("a") == again.kv_scope("a")


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (1e-30, True), (9e-6, True), (1e-5, False), (0.1, False)]
)
def test_a_temperature_near_0_is_greedy(temperature: float, greedy: bool) -> None:
    assert Contract(seed=1, max_tokens=1, temperature=temperature).greedy is greedy
