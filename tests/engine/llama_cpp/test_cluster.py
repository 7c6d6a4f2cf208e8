"""llama.cpp in a cluster of real processes, as a drafter's engine and as a target's, beside our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.engine.gguf.real_files import GEMMA3, SMOLLM2, real_file
from tests.engine.llama_cpp.test_engine import written
from tests.engine.small_checkpoints import MODELS

TARGET = MODELS / "target"
NOTHING: Any = {}  # is set
# Of Gemma in Q4_K_M: inputs are rounded to blocks of int8, and passes of one row otherwise than those of several.
NEAR = 0.5
PROMPT = "def open(self, path):\n    "


async def accepted_drafts(config: ClusterConfig, prompt: str = PROMPT, tokens: int = 300, near: float = 0.0) -> int:
    """How many drafts were accepted at two temperatures, where texts with drafts are those without.

    `near`: the lead of a token over the next best, in log-probability and noise, below which a pass of other rows may
    choose the other one; what follows is another text then.
    """
    accepted = 0
    async with (
        LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        for temperature in (0.0, 0.8):
            terms: dict[str, Any] = {"seed": 5, "max_tokens": tokens, "ignore_eos": True, "temperature": temperature}
            plain = await client.generate(prompt, speculation="off", **terms)
            drafted = await client.generate(prompt, speculation="rounds", **terms)  # waits for drafts
            pairs = zip(plain.token_ids, drafted.token_ids, plain.gaps, strict=True)
            differing = next((gap for ours, theirs, gap in pairs if ours != theirs), 0.0)
            assert differing <= near
            accepted += drafted.usage.accepted
    return accepted


def config(target: Path, drafter: Path, verifying: Any = NOTHING, drafting: Any = NOTHING) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, depth=4),
        verifier=[
            VerifierConfig(model=target, name="target", slots=2, context=800, **verifying),
        ],
        drafter=[DrafterConfig(model=drafter, slots=2, context=800, **drafting)],
    )


@pytest.mark.parametrize("to", ["BF16", "Q8_0"])
async def test_a_file_in_llama_cpp_drafts_for_our_own_engine(to: str, tmp_path: Path) -> None:
    it = config(TARGET, written(tmp_path, to), {"dtype": "float32"}, {"backend": "llama.cpp"})
    assert await accepted_drafts(it) > 100


async def test_our_own_engine_drafts_for_a_file_in_llama_cpp(tmp_path: Path) -> None:
    """The reference drafter as a target, for itself."""
    it = config(written(tmp_path, "F32"), MODELS / "drafter", {"backend": "llama.cpp"})
    assert await accepted_drafts(it) > 100


async def test_a_family_that_our_own_engine_lacks_is_served_by_llama_cpp() -> None:
    """Gemma 3 270M as others published it, for itself: nobody says which engine is to run it."""
    file = real_file(GEMMA3)
    assert await accepted_drafts(config(file, file), "The capital of France is", tokens=40, near=NEAR) > 20


async def test_a_real_file_of_another_tokenizer_drafts_by_text() -> None:
    """SmolLM2 drafts for Gemma 3."""
    target, drafter = real_file(GEMMA3), real_file(SMOLLM2)
    it = config(target, drafter, drafting={"backend": "llama.cpp", "target": target})
    assert await accepted_drafts(it, "The capital of France is", tokens=40, near=NEAR) > 0
