"""Runs the gateway as an HTTP server."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn

from outrider.config import GatewayConfig
from outrider.errors import ConfigError
from outrider.gateway.app import make_app
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.traces import OwnTraces
from outrider.gateway.transport.connections import BoundedConnection
from outrider.gateway.transport.https import NO_PASSWORD, PresentCertificate
from outrider.gateway.transport.tls_connections import TlsConnections
from outrider.rpc.certificate_expiry import CertificateExpiry
from outrider.telemetry.pages import Page

POLL_S = 0.2  # between two checks of the open connections during shutdown


async def serve(config: GatewayConfig, *, announce: Callable[[str], None], page: Page | None = None) -> None:
    """Serve until cancelled; then running answers get `drain_s` to end. `announce` receives the bound address; `page`:
    as of `make_app`.

    Raises ConfigError for an address, a certificate or router settings that cannot be used.
    """
    running = server(config, page)
    with bound(config.listen) as listening:
        serving = asyncio.create_task(running.serve([listening]))
        host, port = listening.getsockname()[:2]
        announce(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            await asyncio.shield(serving)
        finally:
            running.should_exit = True
            await serving


class GatewayServer(uvicorn.Server):
    """A uvicorn server that does not handle signals, and whose shutdown ends when the running answers have ended."""

    def __init__(self, config: uvicorn.Config, metrics: GatewayMetrics, secured: TlsConnections | None) -> None:
        super().__init__(config)
        self.metrics = metrics
        self._secured = secured
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve; a gateway with TLS accepts its connections itself."""
        await super().startup(sockets if self._secured is None else [])
        if self._secured is not None and sockets is not None:
            serve: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
            state = self.server_state
            named = partial(serve, config=self.config, server_state=state, app_state=self.lifespan.state)
            self._accepting = asyncio.create_task(self._secured.accept(sockets[0], named, state.connections))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the running answers, then close."""
        ending = asyncio.create_task(self._close_idle_connections())
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _close_idle_connections(self) -> None:
        """Abort connections without an answer to send: with TLS they wait half a minute for the client's close."""
        while True:
            await asyncio.sleep(POLL_S)
            if not self.server_state.tasks:
                for connection in [*self.server_state.connections]:
                    transport = connection.transport
                    if transport is not None and not transport.get_write_buffer_size():
                        transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def server(config: GatewayConfig, page: Page | None = None) -> GatewayServer:
    """Return a server of the application; its caller provides the sockets; `page`: as of `make_app`. Raises
    ConfigError."""
    present: PresentCertificate | None = None
    secured: TlsConnections | None = None
    expiry = None if config.cert is None else CertificateExpiry(lambda: b"" if present is None else present.pem)
    metrics = GatewayMetrics() if expiry is None else GatewayMetrics(expiry.at)
    app = make_app(config, metrics, expiry, page)
    settings = uvicorn.Config(
        app if config.trust_traces else OwnTraces(app),
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        http=cast(type[asyncio.Protocol], partial(BoundedConnection, max_connections=config.max_connections)),
        ws="none",
        timeout_graceful_shutdown=math.ceil(config.drain_s),
        ssl_certfile=config.cert,
        ssl_keyfile=config.key,
        ssl_keyfile_password=NO_PASSWORD,
    )
    try:
        settings.load()
        if settings.ssl is not None and config.cert is not None and config.key is not None:
            present = PresentCertificate(settings.ssl, config.cert, config.key)
            secured = TlsConnections(settings.ssl, config.max_connections)
    except (ssl.SSLError, OSError):
        raise ConfigError(
            f"cert: {config.cert} and {config.key} must be a certificate and its own key, in PEM and not encrypted"
        ) from None
    return GatewayServer(settings, metrics, secured)


def bound(address: str) -> socket.socket:
    """Return a socket that listens at an address. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of its connections; asyncio does not set it
        return listening
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Python's text repeats the address
        raise ConfigError(f"listen: cannot use {address} ({reason}); choose another") from None
