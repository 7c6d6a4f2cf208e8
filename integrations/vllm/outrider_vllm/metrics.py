"""Figures of remote drafts for Prometheus, beside vLLM's own `vllm:spec_decode_*`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.telemetry.pages import json_page, serving
from outrider.upstream.live import snapshot
from outrider.upstream.remote_drafts import RemoteDrafts


def serving_figures(drafts: RemoteDrafts, address: str, model: str) -> AbstractContextManager[str]:
    """Serve the figures at "HOST:PORT" while the body runs: /metrics for Prometheus, /live for `outrider top`. Raises
    ConfigError where that is in use.
    """
    registry = CollectorRegistry()
    registry.register(_Figures(drafts))
    return serving(address, registry, {"/live": json_page(lambda: snapshot(drafts, model))})


class _Figures:
    """Reads the figures when they are asked for."""

    def __init__(self, drafts: RemoteDrafts) -> None:
        self._drafts = drafts

    def collect(self) -> Iterator[Metric]:
        counts, control = self._drafts.counts, self._drafts.control.estimates()
        yield _counter("steps", "Steps of vLLM that asked for drafts", counts.steps)
        yield _counter("drafted_tokens", "Drafts that vLLM was given", counts.drafted)
        yield _counter("accepted_tokens", "Drafts that vLLM chose, too", counts.accepted)
        yield _counter("seconds", "Time within these steps that drafts took", counts.seconds)
        steps = CounterMetricFamily(
            "outrider_upstream_rows", "Rows of these steps by what they verified", labels=["why"]
        )
        for why, count in tuple(counts.reasons.items()):
            steps.add_metric([why], count)
        yield steps
        yield _gauge("drafters", "Drafters that answer and may draft", self._drafts.drafters)
        yield _gauge("requests", "Requests that are drafted for", len(self._drafts.rows))
        yield _gauge("resting", "Whether drafts would cost more than they bring", control.get("arm") == "rest")
        yield _gauge("tokens_per_second", "Tokens of all requests lately", control.get("tokens_per_s", 0.0))


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"outrider_upstream_{name}", meaning, value=value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"outrider_upstream_{name}", meaning, value=value)
