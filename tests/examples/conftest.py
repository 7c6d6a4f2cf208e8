"""One small cluster for all examples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, TlsConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.certificates import make
from outrider.store.api_keys import Keys
from outrider.store.redis.client import connect

ROOT = Path(__file__).parents[2]
EXAMPLES, MODELS = ROOT / "examples", ROOT / "models"


@dataclass(frozen=True)
class Reached:
    """Where a cluster is, and what a caller needs."""

    router: str  # HOST:PORT
    gateway: str  # URL
    ca: str
    key_file: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that hold all of it."""
        return {
            "PYTHONPATH": str(ROOT),
            "OUTRIDER_ROUTER": self.router,
            "OUTRIDER_CA": self.ca,
            "OUTRIDER_API_KEY": Path(self.key_file).read_text(encoding="utf-8").strip(),
            "SSL_CERT_FILE": self.ca,
        }


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def reached(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reached]:
    folder = tmp_path_factory.mktemp("certs")
    make(folder)
    config = ClusterConfig(
        tls=TlsConfig(ca=folder / "ca.pem", cert=folder / "{role}.pem", key=folder / "{role}.key"),
        router=RouterConfig(listen="127.0.0.1:0", models={"target": MODELS / "target"}, auth="keys"),
        gateway=GatewayConfig(listen="127.0.0.1:0"),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=4, numerics="invariant")],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32", slots=4)],
    )
    async with LocalCluster(config) as cluster:
        async with connect(cluster.redis_url) as redis:
            key, _ = await Keys(redis).add("examples")
        (folder / "key").write_text(f"{key}\n", encoding="utf-8")
        yield Reached(
            cluster.router_address,
            f"https://{cluster.processes['gateway'].address}",
            str(folder / "ca.pem"),
            str(folder / "key"),
        )
