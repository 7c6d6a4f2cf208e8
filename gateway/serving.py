"""The gateway as a server."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from gateway.app import make_app
from outrider.config import GatewayConfig
from outrider.errors import ConfigError

LOOK_S = 0.2  # between two looks at connections, at the end


async def serve(config: GatewayConfig, *, announce: Callable[[str], None]) -> None:
    """Serves until it is cancelled; then what runs gets `drain_s` to end. `announce` hears the bound address.

    Raises ConfigError for an address, a certificate or a router that cannot be.
    """
    running = server(config)
    with bound(config.listen) as listening:
        serving = asyncio.create_task(running.serve([listening]))
        host, port = listening.getsockname()[:2]
        announce(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            await asyncio.shield(serving)
        finally:
            running.should_exit = True
            await serving


class Server(uvicorn.Server):
    """One that leaves signals to whoever runs it, and has ended when its answers have."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers end."""
        ending = asyncio.create_task(self._hang_up())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _hang_up(self) -> None:
        """Ends connections that have nothing to say: by TLS they wait half a minute for their clients' goodbye."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.server_state.tasks:
                for connection in [*self.server_state.connections]:
                    transport = connection.transport
                    if transport is not None and not transport.get_write_buffer_size():
                        transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Of none."""
        yield


def server(config: GatewayConfig) -> Server:
    """Serves the application on sockets that it is given. Raises ConfigError."""
    settings = uvicorn.Config(
        make_app(config),
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=math.ceil(config.drain_s),
        ssl_certfile=config.cert,
        ssl_keyfile=config.key,
        ssl_keyfile_password="none",  # or an encrypted one would have it asked for on the terminal
    )
    try:
        settings.load()
    except (ssl.SSLError, OSError):
        raise ConfigError(
            f"cert: {config.cert} and {config.key} must be a certificate and its own key, in PEM and not encrypted"
        ) from None
    return Server(settings)


def bound(address: str) -> socket.socket:
    """Listens there. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Python's own text says the address again
        raise ConfigError(f"listen: cannot use {address} ({reason}); choose another") from None
