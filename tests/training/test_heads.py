"""Heads learn from the target, and what is measured of them is what they would bring."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.engine.checkpoint import read_config
from outrider.engine.heads.folder import Network, make_network
from outrider.engine.heads.shape import KINDS, Kind, Shape, shape_for
from outrider.engine.native import NativeEngine
from outrider.training.acceptance import Said, say
from outrider.training.heads import Teacher, Terms, acceptance_of, loss_of

TARGET = Path("models/target")
DEPTH = 3


@cache
def text() -> list[int]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return list(tokenizer.encode(Path("outrider/core/tree.py").read_text(encoding="utf-8")).ids)


@cache
def said(temperature: float) -> Said:
    engine = NativeEngine.load(TARGET, dtype="float32", slots=4, rows=96, threads=1)
    prompts = [text()[at : at + 24] for at in range(0, 400, 100)]
    return say(engine, prompts, temperature=temperature, tokens=40, seed=3)


def learner(kind: Kind) -> tuple[Network, Shape, Teacher]:
    torch.manual_seed(1)
    shape = shape_for(kind, read_config(TARGET), depth=DEPTH)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return make_network(shape), shape, Teacher(model, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_bring_tokens(kind: Kind) -> None:
    network, shape, teacher = learner(kind)
    before = [acceptance_of(network, shape, teacher, said(heat), 8) for heat in (0.0, 1.0)]
    descent = torch.optim.AdamW(network.parameters(), lr=2e-3)
    terms = Terms("forward-kl", regression=1.0 if kind == "eagle" else 0.0)
    losses = []
    for step in range(24):
        starts = np.random.default_rng(step).integers(400, len(text()) - 65, 8)
        windows = torch.tensor([text()[start : start + 65] for start in starts])
        loss = loss_of(network, shape, teacher, windows, terms)
        descent.zero_grad()
        loss.backward()
        descent.step()
        losses.append(float(loss.detach()))
    after = [acceptance_of(network, shape, teacher, said(heat), 8) for heat in (0.0, 1.0)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert sum(after) > sum(before) + 0.1, (before, after)
    assert all(length <= DEPTH + 1 for length in after)
    assert all(parameter.grad is None for parameter in teacher._model.parameters())


def test_heads_that_are_the_target_are_always_right() -> None:
    _, shape, teacher = learner("medusa")

    class Right(torch.nn.Module):
        """Medusa's place is taken by what the target really says there."""

    texts = said(1.0)
    features, logits = teacher.read(torch.from_numpy(texts.tokens))
    agreed = [
        (texts.guesses(at, texts.prompt, logits[at, texts.prompt - 1 : -1]) == texts.answers[at]).all()
        for at in range(len(texts.tokens))
    ]
    assert all(agreed)
    assert features.shape == (*texts.tokens.shape, shape.width)
