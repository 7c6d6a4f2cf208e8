"""What people see of drafts for an engine that is not ours: `outrider top`, and traces."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from outrider.cli.generation.top import screen
from outrider.core.session.contract import Contract
from outrider.upstream import foreign_session
from outrider.upstream.live import snapshot
from outrider.upstream.remote_drafts import RemoteDrafts, UpstreamSettings
from tests.engine.small_checkpoints import MODELS
from tests.telemetry.collector import collecting
from tests.upstream.foreign_engine import LONG, PROMPT, ForeignEngine, drafter, wait_until

GREEDY = Contract(seed=1, max_tokens=LONG, temperature=0.0)


@pytest.mark.parametrize("adaptive", [False, True])
def test_outrider_top_shows_requests_drafters_and_why(adaptive: bool) -> None:
    with (
        drafter() as (address, _),
        RemoteDrafts(
            UpstreamSettings([address, "127.0.0.1:9"], MODELS / "target", adaptive=adaptive, wait_ms=200)
        ) as drafts,
    ):
        wait_until(lambda: drafts.drafters)
        before = snapshot(drafts, "acme/target")
        ForeignEngine().text(GREEDY, 80, drafts)
        drafts.open("request-7", PROMPT, GREEDY)
        wait_until(lambda: any(drafts.step([("request-7", [])])) or adaptive)
        now = snapshot(drafts, "acme/target")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(screen([before, now]))
    text = shown.get()
    [line] = [line for line in text.splitlines() if line.startswith("request-7")]
    [worker] = now["workers"][1:]
    assert worker["id"] in text
    assert worker["model"] == "drafter"
    assert "127.0.0.1:9: cannot be reached" in text
    assert 75 <= now["tokens"] <= 80  # all but those of the last step
    if not adaptive:
        assert line.endswith(worker["id"])
        assert now["accepted"] == sum(now["reached_by_depth"]) > 0
        assert now["verified"] >= sum(now["tried_by_depth"]) >= now["accepted"]


async def test_a_request_and_its_drafts_are_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(foreign_session, "TRACER", provider.get_tracer("test"))
    engine = ForeignEngine()
    async with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with (
            drafter() as (address, _),
            RemoteDrafts(UpstreamSettings([address], MODELS / "target", adaptive=False, wait_ms=200)) as drafts,
        ):
            wait_until(lambda: drafts.drafters)
            await asyncio.to_thread(engine.text, GREEDY, 80, drafts)
            wait_until(kept.get_finished_spans)
            [span] = kept.get_finished_spans()
            trace = span.context.trace_id.to_bytes(16)
            await collector.until(lambda: {"draft", "drafting"} <= {it.name for it in collector.of(trace)})
    [attach] = [it for it in collector.of(trace) if it.parent == span.context.span_id.to_bytes(8)]
    assert attach.name == "outrider.v1.Drafter/Attach"
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.id"] == "row of 1"
    assert span.attributes["outrider.nodes.accepted"] == drafts.counts.accepted > 0
