"""Hosts on one machine: network namespaces on a bridge, each with its own address and its own folder for Ray."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Host:
    """One host. Commands that run inside end with it."""

    def __init__(self, number: int, network: str, name: str, folder: Path) -> None:
        self.address = f"{network}.{number}"
        self.gateway = f"{network}.254"  # this machine
        self.name = f"{name}h{number}"
        self._link = f"{name}l{number}"
        self.folder = folder  # the same path on every host, another folder behind it
        self._own = folder.with_name(f"{folder.name}-{number}")
        self._own.mkdir()
        self.names = self._own / "resolv.conf"  # of no server: names are refused at once, and not after seconds
        self.names.touch()
        self._running: list[subprocess.Popen[str]] = []
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", self._link, "master", f"{name}br", "up")
        for setting in (
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {self.gateway}",
        ):
            run("ip", "-n", self.name, *setting.split())

    def start(
        self, command: Sequence[str], output: int = subprocess.DEVNULL, **environment: str
    ) -> subprocess.Popen[str]:
        """Runs a command on the host."""
        mounted = (
            f'mount --bind "{self.names}" /etc/resolv.conf && mount --bind "{self._own}" "{self.folder}" && exec "$@"'
        )
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", mounted, "sh", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def cut_off(self) -> None:
        """From now on nothing that is sent to it arrives, and nothing that it sends."""
        run("ip", "link", "set", self._link, "down")

    def close(self) -> None:
        """Ends what runs on it, and the host."""
        inside = ["ip", "netns", "pids", self.name]
        while pids := subprocess.run(inside, capture_output=True, text=True, check=True).stdout.split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        for process in self._running:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        run("ip", "link", "del", self._link)
        run("ip", "netns", "del", self.name)


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """`count` hosts that reach one another, and this machine them. Raises CalledProcessError where not permitted."""
    name = "ot" + secrets.token_hex(2)
    prefix = f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
    folder = Path(tempfile.mkdtemp(prefix="ot-"))
    (shared := folder / "ray").mkdir()
    hosts: list[Host] = []
    try:
        run("ip", "link", "add", f"{name}br", "type", "bridge")
        try:
            run("ip", "addr", "add", f"{prefix}.254/24", "dev", f"{name}br")
            run("ip", "link", "set", f"{name}br", "up")
            hosts.extend(Host(number, prefix, name, shared) for number in range(1, count + 1))
            yield hosts
        finally:
            for host in hosts:
                host.close()
            run("ip", "link", "del", f"{name}br")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def permitted() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (package iproute2)"
    try:
        with network(1) as (host,):
            done = host.start(["true"])
            done.communicate(timeout=10)
            return "" if done.returncode == 0 else "mount namespaces are not permitted here"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.decode().strip()}"
