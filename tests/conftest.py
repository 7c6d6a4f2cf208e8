"""A real Redis-compatible server for the whole run, emptied for each test that asks for it; and ways to run a part."""

import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from hypothesis import Phase, settings

from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from tests.extended import Extended
from tests.lanes import Durations, Lane
from tests.skips import NoSkips

# What a shell runs in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"  # what is no folder must not be asked of the real hub
os.environ["OMP_NUM_THREADS"] = "1"  # two of PyTorch's would wait for each other where something else needs a core

# No example has a deadline: on a machine that is busy with something else any of them may take long.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")

# For `make mutants`: the same examples for each mutant, no search for the smallest that fails.
settings.register_profile(
    "mutants", max_examples=60, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outrider")
    group.addoption("--lane", metavar="N/OF", help="run one of so many parts of the files, of the same length")
    group.addoption("--table", metavar="FILE", type=Path, help="how long each file takes, for --lane")
    group.addoption("--write-table", metavar="FILE", type=Path, help="write how long each file took")
    group.addoption("--no-skips", action="store_true", help="fail where something is skipped that may not be")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Extended("not extended" in config.getoption("-m")))
    if lane := config.getoption("--lane"):
        config.pluginmanager.register(Lane(lane, config.getoption("--table")))
    if table := config.getoption("--write-table"):
        config.pluginmanager.register(Durations(table))
    if config.getoption("--no-skips"):
        config.pluginmanager.register(NoSkips())


def pytest_collection_finish() -> None:
    """What was imported is looked at by no collection of garbage, which would hold a test's loop up for a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The server's URL, with an empty database behind it."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A connection to the emptied server."""
    client = connect(redis_url)
    assert isinstance(client, redis.asyncio.Redis)
    yield client
    await client.aclose()
