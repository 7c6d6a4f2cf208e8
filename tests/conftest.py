"""A real Redis-compatible server for the whole run, emptied for each test that asks for it."""

import os
from collections.abc import Iterator

import pytest
import redis
from hypothesis import Phase, settings

from outrider.store.embedded import EmbeddedRedis

os.environ["HF_HUB_OFFLINE"] = "1"  # what is no folder must not be asked of the real hub

# For `make mutants`: the same examples for each mutant, no search for the smallest that fails.
settings.register_profile(
    "mutants", max_examples=60, derandomize=True, deadline=None, database=None, phases=(Phase.explicit, Phase.generate)
)


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
