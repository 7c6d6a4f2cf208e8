"""`outrider gateway`: OpenAI's HTTP interface in front of a router."""

from __future__ import annotations

import gc
import secrets
from typing import TYPE_CHECKING

import typer

from outrider.cli.command import reported
from outrider.cli.flags import OBSERVED, RAY, configured, section
from outrider.rpc.lifecycle import die_with_parent, fast_event_loop, run_until_signal

if TYPE_CHECKING:
    from outrider.config import GatewayConfig

GATEWAY = configured("outrider.config:GatewayConfig", *RAY, variables=OBSERVED)


def gateway(context: typer.Context) -> None:
    """Serve OpenAI's API (/v1/completions, /v1/chat/completions, /v1/responses) and Anthropic's (/v1/messages).

    The gateway forwards its callers' API keys to the router.
    """
    config: GatewayConfig = section(context)
    die_with_parent()
    from prometheus_client import CollectorRegistry

    from outrider.gateway.server import serve
    from outrider.telemetry import logs
    from outrider.telemetry.loop_probe import LoopProbe
    from outrider.telemetry.pages import metrics_page
    from outrider.telemetry.process import exporting_telemetry

    probe = LoopProbe()

    def announce(address: str) -> None:
        probe.watch()
        gc.collect()
        gc.freeze()  # otherwise collections traverse all loaded objects, for 0.1 s, while requests wait
        print(f"outrider gateway: listening on {address}", flush=True)

    with reported():
        logs.log_to_stderr(config.log_format)
        pages = {"/alive": probe.page}
        registry = CollectorRegistry() if config.serve_metrics else None
        page = None if registry is None else metrics_page(registry)
        with exporting_telemetry("gateway", f"gateway-{secrets.token_hex(4)}", config.metrics, pages, registry):
            run_until_signal(serve(config, announce=announce, page=page), fast_event_loop)
