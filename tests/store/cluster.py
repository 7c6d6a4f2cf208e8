"""A real Redis Cluster of three primaries on this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import redis

from tests.store.server import Server

NODES = 3
SLOTS = 16384
BUS = 10_000  # its port is higher by this than a node's
_START_S = 20.0


@contextmanager
def redis_cluster(folder: Path) -> Iterator[list[int]]:
    """The nodes' ports, once each of them reports that the cluster is whole. Nothing is left running afterwards."""
    with ExitStack() as stack:
        ports = _free_ports()
        clients = []
        for port in ports:
            home = folder / str(port)
            home.mkdir()
            stack.enter_context(
                Server(
                    home,
                    port=port,
                    bind="127.0.0.1",
                    cluster_enabled="yes",
                    cluster_node_timeout=2000,
                )
            )
            clients.append(stack.enter_context(redis.Redis(port=port, socket_timeout=5)))
        until = time.monotonic() + _START_S
        share = SLOTS // NODES
        for index, client in enumerate(clients):
            end = SLOTS if index == NODES - 1 else (index + 1) * share
            client.execute_command("CLUSTER", "ADDSLOTS", *range(index * share, end))
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for port in ports[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        for client in clients:
            while not _whole(client):
                _wait(until)
        yield ports


def _whole(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER INFO")  # parsed under this name
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(NODES)


def _free_ports() -> list[int]:
    """Ports for the nodes such that those of the cluster bus, which follow from them, are free too."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < NODES:
            client, bus = stack.enter_context(socket.socket()), stack.enter_context(socket.socket())
            client.bind(("127.0.0.1", 0))
            port = client.getsockname()[1]
            with suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + BUS))
                ports.append(port)
    return ports


def _wait(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"the Redis Cluster was not whole within {_START_S:g} s")
    time.sleep(0.02)
