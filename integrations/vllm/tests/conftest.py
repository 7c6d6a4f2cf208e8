from __future__ import annotations

from collections.abc import Iterator

import pytest

from running import Drafter, Vllm, running_drafter, wait_until


@pytest.fixture(scope="module")
def drafter() -> Iterator[Drafter]:
    with running_drafter() as it:
        yield it


@pytest.fixture(scope="module")
def vllm(drafter: Drafter) -> Vllm:
    engine = Vllm([drafter.address])
    wait_until(lambda: engine.drafts.drafters)
    return engine
