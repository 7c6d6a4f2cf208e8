"""A connection to Ray: to a cluster that is there, or one of our own on this machine for the time being."""

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
    from outrider.config import Placed

SETTINGS = {  # in the environment, where it does not say otherwise
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # Ray's agents end with it at once
}
OWN = {  # the same for a cluster of our own
    "RAY_gcs_server_port_wait_time_s": "120",  # that it takes at most to start: longer than Ray's own on a busy machine
}
START_S = 120.0  # for a node to join a cluster of our own, for which Ray has 30 and no setting
PROBE_S = 5.0  # for a cluster to answer at its address
JOIN_S = 3.0  # for nodes that are just joining, where nothing else is said
STORE_BYTES = 80 * 2**20  # of Ray's object store, which we do not use: the least that it takes

_PREFIX = "outrider-ray-"  # of folders; then the process whose it is


@contextmanager
def on_ray(address: str | None, *, cpus: float = 0.0) -> Iterator[None]:
    """Within, this process is a driver on the cluster at `address` ("auto": the one of this machine).

    None starts a cluster on this machine that has `cpus` at least, and ends it with the block. Raises ConfigError where
    Ray is not installed, Unavailable where the cluster cannot be reached.
    """
    with _environment(own=address is None):
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
def _environment(*, own: bool) -> Iterator[None]:
    """Within, Ray finds our settings, some already when it is imported, and for a cluster of our `own` a new token."""
    before = dict(os.environ)
    settings = SETTINGS | OWN if own else SETTINGS
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    if own:  # Ray listens on all of the machine's addresses: without the token nobody may use the cluster
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
            _sweep()
            with _patience():
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
        told = str(error).strip().splitlines()
        where = "none could be started here" if address is None else f"no cluster at {address}"
        raise Unavailable(f"ray: {where}: {told[0] if told else type(error).__name__}") from None
    finally:
        for number, handler in signals.items():  # Ray has put its own in their place
            signal.signal(number, handler)


@contextmanager
def _patience() -> Iterator[None]:
    """Within, Ray asks for a node that it starts until START_S are over, and with pauses. It would take a processor
    from those that it waits for, and give up where they are read from a slow disk."""
    from ray._private import services

    ask: Callable[..., object] = services.get_node

    def wait(*node: object) -> object:
        give_up = time.monotonic() + START_S
        while True:
            try:
                return ask(*node)
            except RuntimeError as error:  # it is not there yet
                if time.monotonic() > give_up:
                    raise TimeoutError(f"a node did not start in {START_S:.0f} s") from error
                time.sleep(0.1)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = ask


def _probe(address: str) -> None:
    """Connects once; `ray.init` would try for minutes.

    Raises OSError where nothing listens at `address`, RayError where no cluster answers there or our token is wrong.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stubs leave it out

        socket.create_connection((host, int(port)), PROBE_S).close()
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # the client would end the process
        GcsClient(address=address)


def _sweep() -> None:
    """Removes the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def needs(place: Placed, threads: int) -> dict[str, float]:
    """What one server, or one rank, takes of a node."""
    gpus = place.gpus or float(getattr(place, "device", "cpu") != "cpu")
    wanted = {"CPU": float(threads if place.cpus is None else place.cpus), "GPU": gpus, **place.resources}
    return {name: amount for name, amount in wanted.items() if amount}


async def find_room(wanted: dict[str, float], count: int, who: str, join_s: float = JOIN_S) -> None:
    """Waits `join_s` seconds at most for nodes that are joining. Raises ConfigError when the cluster's nodes could not
    take that many even if nothing else ran on them."""
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
            f"{who}: {count} of them take {_told(wanted)} each, and the Ray cluster's {len(nodes)} nodes, with "
            f"{_told(there)} in all, have room for {room}"
        )


def node_address() -> str:
    """Where others reach this node of the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def public(listen: str) -> str:
    """Where a server on Ray listens: at its node's own address, where the configuration names the loopback's."""
    host, _, port = listen.rpartition(":")
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return f"{node_address()}:{port}" if loopback else listen


def _told(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
