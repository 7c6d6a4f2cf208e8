"""A connection to Ray: to an existing cluster, or to a temporary one that is started on this machine."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from outrider.config import RayResources

SETTINGS = {  # environment variables of Ray, unless they are set already
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # Ray's agents end at once with their parent
}
TEMPORARY = {  # further variables for a temporary cluster
    "RAY_gcs_server_port_wait_time_s": "120",  # timeout of its start; Ray's default is too short on a busy machine
}
START_S = 120.0  # timeout for a node to join a temporary cluster; Ray waits 30 s and has no setting
PROBE_S = 5.0  # timeout for a cluster to answer at its address
JOIN_S = 3.0  # default time to wait for nodes that are joining
STORE_BYTES = 80 * 2**20  # of Ray's object store, which we do not use: the smallest size that Ray accepts

_PREFIX = "outrider-ray-"  # of temporary folders; the id of their process follows


@contextmanager
def on_ray(address: str | None, *, cpus: float = 0.0) -> Iterator[None]:
    """Make this process a driver of the Ray cluster at `address` within the block ("auto": this machine's cluster).

    With None, start a temporary cluster on this machine with at least `cpus` CPUs, and end it with the block. Raises
    ConfigError if Ray is not installed, Unavailable if the cluster cannot be reached.
    """
    with _environment(temporary=address is None):
        try:
            import ray
        except ImportError:
            raise ConfigError("Ray is not installed; `pip install 'outrider[ray]'`") from None
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-") if address is None else None
        try:
            _connect(address, folder, cpus)
            yield
        finally:
            ray.shutdown()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _environment(*, temporary: bool) -> Iterator[None]:
    """Set Ray's variables within the block, and a new token for a `temporary` cluster. Ray reads some at its import."""
    before = dict(os.environ)
    settings = SETTINGS | TEMPORARY if temporary else SETTINGS
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    if temporary:  # Ray listens on all addresses of the machine; the token keeps others from using the cluster
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _connect(address: str | None, folder: str | None, cpus: float) -> None:
    import ray

    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if address is None:
            _remove_stale_folders()
            with _longer_node_timeout():
                ray.init(
                    num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    object_store_memory=STORE_BYTES,
                    _temp_dir=folder,
                )
        else:
            _probe(address)
            ray.init(address=address, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines()
        where = "none could be started here" if address is None else f"no cluster at {address}"
        raise Unavailable(f"ray: {where}: {lines[0] if lines else type(error).__name__}") from None
    finally:
        for number, handler in signals.items():  # Ray has replaced the handlers
            signal.signal(number, handler)


@contextmanager
def _longer_node_timeout() -> Iterator[None]:
    """Make Ray poll for a starting node for START_S and with pauses, within the block.

    Ray polls without pauses, which slows the processes that it waits for, and gives up too early when they load from a
    slow disk.
    """
    from ray._private import services

    get_node: Callable[..., object] = services.get_node

    def wait(*node: object) -> object:
        give_up = time.monotonic() + START_S
        while True:
            try:
                return get_node(*node)
            except RuntimeError as error:  # the node has not joined yet
                if time.monotonic() > give_up:
                    raise TimeoutError(f"a node did not start in {START_S:.0f} s") from error
                time.sleep(0.1)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = get_node


def _probe(address: str) -> None:
    """Connect once, because `ray.init` would retry for minutes.

    Raises OSError if nothing listens at `address`, RayError if no cluster answers there or the token is wrong.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stubs leave it out

        socket.create_connection((host, int(port)), PROBE_S).close()
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # else the client would exit the process
        GcsClient(address=address)


def _remove_stale_folders() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def needs(place: RayResources, threads: int) -> dict[str, float]:
    """Return the resources that one server or one rank reserves on a node."""
    gpus = place.gpus or float(getattr(place, "device", "cpu") != "cpu")
    wanted = {"CPU": float(threads if place.cpus is None else place.cpus), "GPU": gpus, **place.resources}
    return {name: amount for name, amount in wanted.items() if amount}


async def find_room(wanted: dict[str, float], count: int, who: str, join_s: float = JOIN_S) -> None:
    """Check that the cluster's nodes have room for `count` servers or ranks if nothing else ran on them.

    Wait up to `join_s` seconds for nodes that are joining. Raises ConfigError if there is no room.
    """
    import ray

    give_up = time.monotonic() + join_s
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(
            min((int(node.get(name, 0.0) / amount + 1e-6) for name, amount in wanted.items()), default=count)
            for node in nodes
        )
        if room >= count:
            return
        if time.monotonic() < give_up:
            await asyncio.sleep(0.5)
            continue
        there = {name: sum(node.get(name, 0.0) for node in nodes) for name in wanted}
        raise ConfigError(
            f"{who}: {count} of them take {_amounts(wanted)} each, and the Ray cluster's {len(nodes)} nodes, with "
            f"{_amounts(there)} in all, have room for {room}"
        )


def node_address() -> str:
    """Return the address at which other nodes reach this node of the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def public(listen: str) -> str:
    """Return the address on which a server on Ray listens: its node's address instead of a loopback address."""
    host, _, port = listen.rpartition(":")
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return f"{node_address()}:{port}" if loopback else listen


def _amounts(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
