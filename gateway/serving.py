"""The gateway as a server."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from gateway.app import make_app
from outrider.config import GatewayConfig
from outrider.errors import ConfigError

DRAIN_S = 30  # that answers get to end, after a signal


def serve(config: GatewayConfig, *, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `announce` hears the bound address. Raises ConfigError for one that cannot be."""
    with bound(config.listen) as listening:
        host, port = listening.getsockname()[:2]
        announce(f"{host}:{port}")
        server(config).run(sockets=[listening])


def server(config: GatewayConfig) -> uvicorn.Server:
    """Serves the application on sockets that it is given."""
    return uvicorn.Server(
        uvicorn.Config(
            make_app(config), lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_S
        )
    )


def bound(address: str) -> socket.socket:
    """Listens there. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"listen: cannot use {address} ({error.strerror}); choose another") from None
