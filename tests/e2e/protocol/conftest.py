"""What the tests of the protocol share: addresses, and a text whose every token is known."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from outrider.core.session.contract import OFF, Contract
from outrider.fleet.cluster import LocalCluster
from outrider.v1 import types_pb2
from outrider.wire.codec import contract_to_pb
from tests.e2e.mini_router import decode

LENGTH = 480  # of the answer; a generation that is not acknowledged further ends long before


class Text(NamedTuple):
    """A prompt, and the target's answer to it."""

    prompt: list[int]
    answer: list[int]
    contract: types_pb2.Contract

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.answer


@pytest.fixture(scope="session")
def verifier(cluster: LocalCluster) -> str:
    """The verifier's address."""
    return cluster.processes["verifier-0"].address


@pytest.fixture(scope="session")
def drafter(cluster: LocalCluster) -> str:
    """A drafter's address. It holds the small model."""
    return cluster.processes["drafter-0"].address


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def text(verifier: str, tokenizer: Tokenizer, prompts: list[str]) -> Text:
    """A prompt and its answer, from plain decode."""
    prompt = tokenizer.encode(prompts[0]).ids
    contract = Contract(seed=21, max_tokens=LENGTH, temperature=0.8)
    answer = await decode(verifier, prompt, contract, plan=OFF)
    return Text(prompt, answer.tokens, contract_to_pb(contract))
