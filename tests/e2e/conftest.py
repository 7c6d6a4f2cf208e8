"""A whole cluster of real processes: reference models in fp32, one thread each."""

import json
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from outrider.store.redis.client import connect
from tests.e2e.mini_router import trust

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"


def cluster_config(drafters: int = 1) -> ClusterConfig:
    """Target and drafters in fp32: a drafter for each of `drafters`, and the target itself as the last.

    Drafting ahead is pinned: for a target so small it may never pay, and what is drafted is what these tests are about.
    """
    small = DrafterConfig(model=MODELS / "drafter", dtype="float32", slots=16)
    equal = DrafterConfig(model=MODELS / "target", dtype="float32", slots=16)
    return ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0", models={"target": MODELS / "target"}, max_sessions=16, queue=0, overlap=True
        ),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=16)],
        drafter=[small] * drafters + [equal],
    )


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def cluster() -> AsyncIterator[LocalCluster]:
    """Drafters 0 and 1 hold the small model, drafter 2 the target."""
    async with LocalCluster(cluster_config(drafters=2), forward=lambda name, line: print(name, line)) as running:
        await trust(running)
        yield running
        async with aclosing(connect(running.redis_url)) as redis:
            assert await redis.acl_log() == []  # no server tried what its user in Redis may not do


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Short held-out prompts."""
    lines = (ROOT / "examples" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [entry["prompt"] for entry in entries if entry["id"].endswith("#short")]


@pytest.fixture(scope="session")
def reference(tokenizer: Tokenizer, prompts: list[str]) -> list[int]:
    """The greedy answer of transformers to the first prompt: 256 tokens."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about itself
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
        ids = tokenizer.encode(prompts[0]).ids
        with torch.inference_mode():
            generated = model.generate(
                torch.tensor([ids]), max_new_tokens=256, do_sample=False, eos_token_id=None, pad_token_id=0
            )
    return generated[0, len(ids) :].tolist()
