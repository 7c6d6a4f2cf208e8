"""A drafter on a laptop at home: behind address translation, with no port that anybody could reach."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.faults import FaultProxy
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS
from tests.e2e.laptop import dialed
from tests.e2e.test_gate import drafted
from tests.fleet.hosts import Host, network, permitted, run

refused = permitted() or ("" if shutil.which("nft") else "there is no `nft` command (package nftables)")
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.extended,
    pytest.mark.skipif(bool(refused), reason=refused or "hosts can be made"),
]

INSIDE = "192.168.77"
RULES = """
table ip home {
  chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
  chain through { type filter hook forward priority 0; iifname "eth0" ct state new drop; %s }
  chain in { type filter hook input priority 0; iifname "eth0" ct state new drop; }
}
"""


class Home:
    """A router at home, which is a host of the network, and a laptop behind it."""

    def __init__(self, router: Host) -> None:
        self._router = router.name
        self._laptop = f"lap{secrets.token_hex(2)}"

    def __enter__(self) -> Home:
        run("ip", "netns", "add", self._laptop)
        ends = ("inner", "netns", self._router, "type", "veth", "peer", "name", "eth0", "netns", self._laptop)
        run("ip", "link", "add", *ends)
        for where, setting in (
            (self._router, f"addr add {INSIDE}.1/24 dev inner"),
            (self._router, "link set inner up"),
            (self._laptop, f"addr add {INSIDE}.2/24 dev eth0"),
            (self._laptop, "link set eth0 up"),
            (self._laptop, "link set lo up"),
            (self._laptop, f"route add default via {INSIDE}.1"),
        ):
            run("ip", "-n", where, *setting.split())
        run("ip", "netns", "exec", self._router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        self.lose(0)
        return self

    def lose(self, percent: int) -> None:
        """From now on this share of all packets is lost, in both directions."""
        loss = f"numgen random mod 100 < {percent} drop;" if percent else ""
        rules = f"flush ruleset\n{RULES % loss}"
        command = ["ip", "netns", "exec", self._router, "nft", "-f", "-"]
        subprocess.run(command, input=rules, text=True, check=True, capture_output=True)

    def cut(self, *, off: bool) -> None:
        """Cuts the laptop off, or brings it back."""
        run("ip", "-n", self._router, "link", "set", "inner", "down" if off else "up")

    @property
    def inside(self) -> tuple[str, ...]:
        """Runs a command on the laptop."""
        return "ip", "netns", "exec", self._laptop

    def __exit__(self, *_: object) -> None:
        run("ip", "netns", "del", self._laptop)


@asynccontextmanager
async def cluster(address: str, verifier: str) -> AsyncIterator[LocalCluster]:
    """A router at an address that the home reaches, and a verifier."""
    config = ClusterConfig(
        router=RouterConfig(listen=f"{address}:0", models={"target": MODELS / "target"}),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=4, listen=f"{verifier}:0")],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


@pytest.mark.parametrize("reached", ["directly", "through the router"])
async def test_a_laptop_behind_translation_drafts(reached: str, prompts: list[str]) -> None:
    with network(1) as (host,), Home(host) as home:
        here = host.gateway
        async with (
            cluster(here, here if reached == "directly" else "127.0.0.1") as running,
            AsyncClient(running.router_address) as client,
            dialed(running.router_address, inside=home.inside) as laptop,
        ):
            assert await drafted(client, prompts[0])
            home.cut(off=True)
            assert not await drafted(client, prompts[1], attempts=2)
            home.cut(off=False)
            assert await drafted(client, prompts[2], attempts=40)
            home.lose(5)
            assert await drafted(client, prompts[3], attempts=40)
            assert any("is reached at" in line for line in laptop.printed) == (reached == "directly")


async def test_a_laptop_at_200_ms_disturbs_nobody(prompts: list[str]) -> None:
    with network(1) as (host,), Home(host) as home:
        async with (
            cluster("127.0.0.1", "127.0.0.1") as running,
            FaultProxy(running.router_address, seed=5, delay_s=0.1, host=host.gateway) as proxy,
            AsyncClient(running.router_address) as client,
            dialed(proxy.address, inside=home.inside),
        ):
            terms: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
            plain = await client.generate(prompts[0], speculation="off", **terms)
            for _ in range(3):
                fast = await asyncio.wait_for(client.generate(prompts[0], **terms), 20)
                assert fast.token_ids == plain.token_ids
            assert await drafted(client, prompts[1])
