"""The page with vLLM's names has what the other page has, and no metric that vLLM lacks."""

from __future__ import annotations

import re
import urllib.request

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.telemetry.catalogue import METRICS
from outrider.telemetry.pages import serving
from outrider.telemetry.vllm_names import LABELS, NAMES

KNOWN = {metric.exposed.removesuffix("_total"): metric for metric in METRICS}


def test_the_vllm_page_has_the_values_of_the_metrics_page() -> None:
    registry = CollectorRegistry()
    Counter("spec_decode_num_accepted_tokens_per_pos", "x", ["position"], registry=registry).labels("2").inc(7)
    first = Histogram(
        *("gen_ai_server_time_to_first_token_seconds", "x", ["gen_ai_request_model"]), registry=registry, buckets=[1.0]
    )
    first.labels("target").observe(0.5)
    Gauge("outrider_slots", "x", registry=registry).set(3)
    with serving("127.0.0.1:0", registry, {}) as address:
        pages = [
            urllib.request.urlopen(f"http://{address}/metrics{path}", timeout=20).read().decode()
            for path in ("", "/vllm")
        ]
    assert "outrider_slots 3.0" in pages[0]
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 7.0' in pages[1]
    assert 'vllm:time_to_first_token_seconds_bucket{le="1.0",model_name="target"} 1.0' in pages[1]
    assert 'vllm:time_to_first_token_seconds_count{model_name="target"} 1.0' in pages[1]
    assert "outrider_slots" not in pages[1]
    assert set(re.findall(r"^# HELP (\S+)(?<!_created) ", pages[1], re.MULTILINE)) == {
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:time_to_first_token_seconds",
    }


def test_every_vllm_name_maps_to_a_catalogued_metric() -> None:
    labels = {label.replace(".", "_") for name in NAMES for label in KNOWN[name].labels}
    assert labels >= LABELS.keys()
    assert len(set(NAMES.values())) == len(NAMES)
