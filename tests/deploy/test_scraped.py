"""A running cluster exposes every series that dashboards and alerts query, under the labels that they expect."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

import outrider
from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, VerifierConfig
from outrider.errors import NotFound
from outrider.fleet.cluster import LocalCluster
from tests.deploy.promql import SCRAPED
from tests.deploy.shipped import checker, families, queries, rules
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

_FROM_OTEL = {"otel_scope_name", "otel_scope_version", "otel_scope_schema_url"}


Scraped = dict[str, set[frozenset[str]]]  # what the pages of a cluster hold: labels of each series, by its name


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def scraped() -> AsyncIterator[Scraped]:
    """After an answer through the gateway, and a request that failed."""
    target, lines = MODELS / "target", list[str]()
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0",
            models={"target": target},
            policy="rounds",  # steps wait for drafts, however busy the machine is
            depth=4,
            metrics="127.0.0.1:0",
        ),
        verifier=[VerifierConfig(model=target, dtype="float32", metrics="127.0.0.1:0")],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32", metrics="127.0.0.1:0")],
        gateway=GatewayConfig(listen="127.0.0.1:0", metrics="127.0.0.1:0"),
    )
    async with LocalCluster(config, forward=lambda name, line: lines.append(line)) as cluster:
        url = f"http://{cluster.processes['gateway'].address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            await client.completions.create(model="target", prompt="def main(", max_tokens=300)
        async with outrider.AsyncClient(cluster.router_address) as client:
            with pytest.raises(NotFound):
                await client.generate("def main(", model="none", max_tokens=1)
        addresses = [line.rpartition(" ")[2] for line in list(lines) if ": metrics at " in line]
        pages = [await asyncio.to_thread(_page, address) for address in addresses]
    assert len(pages) == 4
    found: Scraped = defaultdict(set)
    for page in pages:
        for family in families(page):
            for sample in family.samples:
                found[sample.name].add(frozenset(sample.labels.keys() - _FROM_OTEL))
    yield found


def _page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return str(answer.read().decode())


async def test_every_metric_in_a_query_is_scraped_with_its_labels(scraped: Scraped) -> None:
    checks = checker()
    for query in [
        *(asked.query for asked in queries()),
        *(rule["expr"] for rule in (*rules("record"), *rules("alert"))),
    ]:
        checks.labels(query)
    recorded = {rule["record"] for rule in rules("record")}
    for name in sorted(checks.asked - recorded - {"up"}):
        expected = checks.series[name].labels - SCRAPED
        assert expected in scraped[name], name
        assert all(labels <= expected for labels in scraped[name]), name


async def test_every_scraped_metric_is_in_the_catalogue(scraped: Scraped) -> None:
    """The catalogue that queries are checked against is what pages show."""
    known = checker().series.keys() | {"target_info"}
    assert {name for name in scraped if not name.endswith("_created")} <= known
