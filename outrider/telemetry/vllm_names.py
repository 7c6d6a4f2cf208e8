"""The metrics that vLLM has, too, under its names: for dashboards and tools that were made for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

# By the name in our catalogue, as Prometheus has it, but for `_total`. https://docs.vllm.ai, "Production metrics"
NAMES: Final[Mapping[str, str]] = {
    "spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "outrider_tokens": "vllm:generation_tokens",
    "outrider_requests_running": "vllm:num_requests_running",
    "outrider_queue_depth": "vllm:num_requests_waiting",
    "outrider_kv_preemptions": "vllm:num_preemptions",
    "gen_ai_server_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "gen_ai_server_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "outrider_queue_wait_seconds": "vllm:request_queue_time_seconds",
}
LABELS: Final[Mapping[str, str]] = {"gen_ai_request_model": "model_name"}


class VllmNames(Collector):
    """Collects the metrics of another registry that vLLM has, too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield them with vLLM's names."""
        for family in self._registry.collect():
            if (name := NAMES.get(family.name)) is None:
                continue
            renamed = Metric(name, family.documentation, family.type)
            for sample in family.samples:
                labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
                renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
            yield renamed
