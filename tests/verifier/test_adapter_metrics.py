"""Acceptance by adapter, with a bound on the labels that callers can cause."""

from __future__ import annotations

import pytest

from outrider.core.session.contract import Adapter, StepReport
from verifier_svc import metrics
from verifier_svc.metrics import OTHERS, StepMetrics


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> StepMetrics:
    monkeypatch.setattr(metrics, "MAX_ADAPTERS", 2)
    return StepMetrics()


def read(step_metrics: StepMetrics) -> list[dict[str, float]]:
    """Trees, verified nodes and accepted ones, by adapter."""
    return [step_metrics.by_adapter(name) for name in ("steps", "verified", "accepted")]


def test_adapter_metrics_count_by_folder_and_group_further_folders(counted: StepMetrics) -> None:
    for folder, digest, accepted in (("a", "0", 2), ("a", "1", 1), ("b", "0", 0), ("c", "0", 3), ("d", "0", 3)):
        report = StepReport(verified=5, accepted=accepted, verified_depth=4)
        counted.record_commit(report, accepted + 1, Adapter(folder, digest * 32))
    counted.record_commit(StepReport(verified=5, accepted=4, verified_depth=4), 5, None)
    assert read(counted) == [
        {"a": 2.0, "b": 1.0, OTHERS: 2.0},
        {"a": 10.0, "b": 5.0, OTHERS: 10.0},
        {"a": 3.0, "b": 0.0, OTHERS: 6.0},
    ]
    assert counted.committed == 19


def test_a_step_that_verified_nothing_is_not_counted(counted: StepMetrics) -> None:
    counted.record_commit(StepReport(), 1, Adapter("a", "0" * 32))
    assert read(counted) == [{"a": 0.0}] * 3
