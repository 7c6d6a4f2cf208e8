"""What drafts brought, in the form that vLLM gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.gateway import serialize


def generation(tried: tuple[int, ...], reached: tuple[int, ...], verified: int) -> Any:
    return SimpleNamespace(
        usage=SimpleNamespace(tried_by_depth=tried, reached_by_depth=reached, verified=verified, accepted=sum(reached))
    )


def test_steps_are_counted_by_accepted_tokens_over_all_choices() -> None:
    several = [generation((10, 8, 3), (6, 2), 40), generation((5,), (), 5), generation((), (), 0)]
    figures = serialize.speculation(several)["metrics"]["speculative_decoding"]
    assert figures == {
        "mean_acceptance_length": 1 + 8 / 15,
        "draft_acceptance_rate": 8 / 45,
        "acceptance_histogram": [9, 4, 2],
        "num_spec_steps": 15,
        "num_draft_tokens": 45,
        "num_accepted_draft_tokens": 8,
        "num_spec_tokens": 3,
    }
    assert sum(figures["acceptance_histogram"]) == 15
    assert sum(accepted * steps for accepted, steps in enumerate(figures["acceptance_histogram"])) == 8


def test_an_answer_without_verified_drafts_has_no_metrics() -> None:
    assert serialize.speculation([generation((), (), 0)]) == {}
    assert serialize.speculation([generation((0,), (0,), 0)]) == {}
