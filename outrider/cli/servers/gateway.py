"""`outrider gateway`: OpenAI's HTTP interface in front of a router."""

from __future__ import annotations

import gc
import secrets
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.command import reported
from outrider.cli.servers.serve import LogFormat, Metrics
from outrider.rpc.lifecycle import die_with_parent, fast_event_loop, run_until_signal


def gateway(
    router: Annotated[str | None, typer.Option(help="HOST:PORT of the router. [default: 127.0.0.1:7070]")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT. [default: 127.0.0.1:8000]")] = None,
    cert: Annotated[Path | None, typer.Option(help="The gateway's certificate, in PEM; it serves HTTPS then.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of that certificate, in PEM.")] = None,
    ca: Annotated[Path | None, typer.Option(help="CA that signed the router's certificate, in PEM.")] = None,
    tls: Annotated[
        bool | None, typer.Option("--tls/--no-tls", help="Use TLS to the router. [default: with a --ca]")
    ] = None,
    server_name: Annotated[
        str | None, typer.Option(help="Name that the router's certificate must have. [default: its host's]")
    ] = None,
    max_request_bytes: Annotated[int | None, typer.Option(help="Largest request body. [default: 4194304]")] = None,
    max_total_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of all requests that run, times their n; half for one tenant. [default: 16777216]"),
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Requests at the same time; half for one tenant. [default: 1024]")
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="Connections at the same time. [default: 4096]")] = None,
    body_s: Annotated[float | None, typer.Option(help="Seconds that a body may take to arrive. [default: 30]")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds that one request may take. [default: 600]")] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that running answers get after a SIGTERM. [default: 30]")
    ] = None,
    trust_traces: Annotated[
        bool | None, typer.Option(help="Let callers decide whether their requests are traced.")
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
) -> None:
    """Serve OpenAI's API: /v1/completions, /v1/chat/completions and /v1/models.

    The gateway forwards its callers' API keys to the router.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    die_with_parent()
    from outrider.config import GatewayConfig, parse
    from outrider.gateway.server import serve
    from outrider.telemetry import logs
    from outrider.telemetry.loop_probe import LoopProbe
    from outrider.telemetry.process import exporting_telemetry

    probe = LoopProbe()

    def announce(address: str) -> None:
        probe.watch()
        gc.collect()
        gc.freeze()  # otherwise collections traverse all loaded objects, for 0.1 s, while requests wait
        print(f"outrider gateway: listening on {address}", flush=True)

    with reported():
        config = parse(GatewayConfig, given, "flags")
        logs.log_to_stderr(config.log_format)
        pages = {"/alive": probe.page}
        with exporting_telemetry("gateway", f"gateway-{secrets.token_hex(4)}", config.metrics, pages):
            run_until_signal(serve(config, announce=announce), fast_event_loop)
