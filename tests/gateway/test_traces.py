"""What a caller's trace context does to its request. tests/telemetry/test_tracing.py has it with a collector."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider

from outrider.config import GatewayConfig
from outrider.gateway.server import server
from outrider.gateway.traces import OwnTraces, linked

TRACE, CALLER = 0xABC, 0xDEF
CONTEXT = f"00-{TRACE:032x}-{CALLER:016x}-01".encode()


@pytest.mark.parametrize(("trusted", "kind"), [(False, OwnTraces), (True, FastAPI)])
def test_callers_are_trusted_only_where_the_configuration_states_it(trusted: bool, kind: type[Any]) -> None:
    assert isinstance(server(GatewayConfig(trust_traces=trusted)).config.app, kind)
    assert not GatewayConfig().trust_traces


@pytest.mark.parametrize(("traceparent", "links"), [(CONTEXT, [(TRACE, CALLER)]), (b"nonsense", []), (None, [])])
async def test_an_application_does_not_see_the_context_and_its_span_has_a_link(
    traceparent: bytes | None, links: list[tuple[int, int]]
) -> None:
    tracer, seen = TracerProvider(shutdown_on_exit=False).get_tracer("test"), dict[bytes, bytes]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope["headers"])

    async def in_a_span(scope: Any, receive: Any, send: Any) -> None:
        with tracer.start_as_current_span("request") as span:
            await linked(application)(scope, receive, send)
        found = [(link.context.trace_id, link.context.span_id) for link in span.links]  # type: ignore[attr-defined]
        assert found == links

    given = {b"TraceParent": traceparent, b"tracestate": b"a=b", b"baggage": b"c=d", b"host": b"x"}
    headers = [(name, value) for name, value in given.items() if value is not None]
    await OwnTraces(in_a_span)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == {b"host": b"x"}
