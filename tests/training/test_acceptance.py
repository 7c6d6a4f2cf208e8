"""The acceptance length is that of a drafter that really drafts: counted by hand, and against a cluster's own rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
from outrider.training.acceptance import (
    TargetTexts,
    acceptance_length,
    chain_acceptance_length,
    chains_along,
    generate_texts,
)

PROMPT, ANSWER, GAMMA = 24, 40, 4


def load(name: str, slots: int) -> CpuEngine:
    return CpuEngine.load(Path("models") / name, EngineSettings(dtype="float32", slots=slots, rows=128, threads=1))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file("models/target/tokenizer.json")
    lines = Path("examples/held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]).ids[:PROMPT] for line in lines[:3]]


@pytest.fixture(scope="module", params=[0.0, 1.0])
def generated(request: pytest.FixtureRequest, prompts: list[list[int]]) -> TargetTexts:
    return generate_texts(load("target", len(prompts)), prompts, temperature=request.param, tokens=ANSWER, seed=7)


def after(engine: CpuEngine) -> Callable[[Tensor], Tensor]:
    def logits(ids: Tensor) -> Tensor:
        count = ids.shape[1]
        return torch.from_numpy(engine.forward([Segment(0, 0, ids[0].numpy(), np.arange(count))])).clone()[None]

    return logits


def test_a_walk_counts_the_agreeing_tokens_and_one_more() -> None:
    agreed = np.array([[1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1]], np.bool_)
    # From 0: two, and one more. From 3: four. From 8: none. From 9 a chain of four no longer fits the text.
    assert chains_along(agreed, 4).shape == (1, 8, 4)
    assert acceptance_length(chains_along(agreed, 4)) == (3 + 5) / 2
    assert acceptance_length(chains_along(~np.zeros((2, 20), np.bool_), 4)) == 5.0
    assert acceptance_length(chains_along(np.zeros((2, 20), np.bool_), 4)) == 1.0
    with pytest.raises(ValueError, match="take longer ones"):
        acceptance_length(np.zeros((1, 0, 4), np.bool_))


def test_the_target_generates_equal_texts_in_a_batch_and_alone(
    generated: TargetTexts, prompts: list[list[int]]
) -> None:
    for prompt, tokens, seed in zip(prompts, generated.tokens, generated.seeds, strict=True):
        engine = load("target", 1)
        contract = Contract(seed=seed, max_tokens=ANSWER, temperature=generated.temperature)
        sampler = Sampler(contract, engine.vocabulary, prompt, PROMPT)
        text = list(prompt)
        for at in range(PROMPT - 1, PROMPT + ANSWER - 1):
            begun = 0 if at == PROMPT - 1 else at
            where = np.arange(begun, at + 1)
            text.append(
                sampler.choose(engine.forward([Segment(0, begun, np.array(text)[where], where, None, 1)])[0]).token
            )
            sampler.extend(text[-1:])
        assert text == tokens.tolist()


def test_a_drafter_that_is_the_target_is_always_right(generated: TargetTexts) -> None:
    assert chain_acceptance_length(after(load("target", 1)), generated, GAMMA) == GAMMA + 1


def test_a_better_drafter_has_a_greater_acceptance_length_which_equals_the_drafted_one(generated: TargetTexts) -> None:
    lengths = {name: chain_acceptance_length(after(load(name, 1)), generated, GAMMA) for name in ("mid", "drafter")}
    assert 1.0 < lengths["drafter"] < lengths["mid"] < GAMMA + 1
    assert lengths["drafter"] == pytest.approx(drafted(load("drafter", 1), generated))


def drafted(engine: CpuEngine, generated: TargetTexts) -> float:
    """By really drafting chains, one token after the other, from each root."""
    steps = tokens = 0
    for text, seed in zip(generated.tokens.tolist(), generated.seeds, strict=True):
        root = PROMPT
        while root + GAMMA <= len(text):
            contract = Contract(seed=seed, max_tokens=ANSWER, temperature=generated.temperature)
            sampler = Sampler(contract, engine.vocabulary, text[:root], PROMPT)
            chain: list[int] = []
            while len(chain) < GAMMA:
                known = np.array([*text[:root], *chain])
                logits = engine.forward([Segment(0, 0, known, np.arange(len(known)), None, 1)])[0]
                chain.append(sampler.choose(logits, chain).token)
                if chain[-1] != text[root + len(chain) - 1]:
                    chain.pop()
                    break
            steps, tokens, root = steps + 1, tokens + len(chain) + 1, root + len(chain) + 1
    return tokens / steps
