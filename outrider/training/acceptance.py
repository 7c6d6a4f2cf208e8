"""Computes the exact acceptance length of a drafter on texts that the target generated, without a cluster.

Under shared noise a drafted token is accepted if and only if it is the target's token. So it is enough to compare, at
each position of such a text, the drafter's first choice with the text. A chain of gamma guesses then commits the tokens
that agree from its root on, and the target's token after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import FloatRow, gumbel_row
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine

GAMMA = 8  # guesses of a chain
CHUNK = 128  # about the number of prompt tokens, over all prompts, that one pass reads

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """Texts of one length that a target generated, each with the noise of its own seed."""

    tokens: NDArray[np.int64]  # [texts, prompt + answer]
    prompt: int  # tokens before the answer
    temperature: float
    seeds: tuple[int, ...]

    @property
    def answers(self) -> NDArray[np.int64]:
        """The tokens after the prompts: [texts, answer]."""
        return self.tokens[:, self.prompt :]

    def guesses(self, text: int, first: int, logits: Tensor) -> NDArray[np.int64]:
        """Return the first choice of a model at each of a text's positions from `first` on: [rows].

        `logits`: the model's, [rows, vocabulary].
        """
        return first_choices(logits, self.seeds[text], self.temperature, first)


def first_choices(
    logits: Tensor, seed: int, temperature: float, first: int, ids: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the first choice of a model under shared noise at each position from `first` on: [rows].

    `logits`: [rows, ids]; `ids`: ascending, of a reduced vocabulary; None: the whole.
    """
    scores: FloatRow = logits.detach().double().cpu().numpy()
    ids = np.arange(scores.shape[-1]) if ids is None else ids
    if temperature > 0.0:
        scores /= temperature
        for row, score in enumerate(scores):
            score += gumbel_row(seed, 0, first + row, int(ids[-1]) + 1)[ids]
    chosen: NDArray[np.int64] = ids[scores.argmax(-1)]
    return chosen


def generate_texts(
    engine: Engine, prompts: Sequence[Sequence[int]], *, temperature: float, tokens: int, seed: int
) -> TargetTexts:
    """Generate `tokens` tokens after each of some prompts of one length. An end of text does not end an answer.

    The engine must have a slot for each prompt. Raises ValueError if it has not, or if the prompts differ in length.
    """
    (length,) = {len(prompt) for prompt in prompts}
    seeds = tuple(seed + text for text in range(len(prompts)))
    samplers = [
        Sampler(Contract(seed=each, max_tokens=tokens, temperature=temperature), engine.vocabulary, prompt, length)
        for each, prompt in zip(seeds, prompts, strict=True)
    ]
    texts = [list(prompt) for prompt in prompts]

    def read(first: int, last: int, wanted: int) -> NDArray[np.float32]:
        where = np.arange(first, last)
        return engine.forward(
            [Segment(slot, first, np.array(text[first:last]), where, None, wanted) for slot, text in enumerate(texts)]
        )

    part = max(1, CHUNK // len(texts))
    for first in range(0, length - 1, part):
        read(first, min(first + part, length - 1), 0)
    for at in range(length - 1, length + tokens - 1):
        for row, text, sampler in zip(read(at, at + 1, 1), texts, samplers, strict=True):
            text.append(sampler.choose(row).token)
            sampler.extend(text[-1:])
    return TargetTexts(np.array(texts, np.int64), length, temperature, seeds)


def chain_acceptance_length(logits: Callable[[Tensor], Tensor], texts: TargetTexts, gamma: int = GAMMA) -> float:
    """Return the acceptance length of a causal model that drafts chains.

    `logits` takes ids [1, tokens] and returns the model's logits after each of them: [1, tokens, vocabulary].
    """
    agreed = np.empty(texts.answers.shape, np.bool_)
    for text, tokens in enumerate(torch.from_numpy(texts.tokens)):
        with torch.no_grad():
            after = logits(tokens[None, :-1])[0, texts.prompt - 1 :]
        agreed[text] = texts.guesses(text, texts.prompt, after) == texts.answers[text]
    return acceptance_length(chains_along(agreed, gamma))


def chains_along(agreed: BoolArray, gamma: int) -> BoolArray:
    """Return which guesses of a chain from each root agree, for a drafter whose guess does not depend on the root.

    `agreed`: [texts, positions]. Return [texts, roots, gamma], for the roots whose chain lies within the text.
    """
    return np.lib.stride_tricks.sliding_window_view(agreed, gamma, axis=1)


def acceptance_length(agreed: BoolArray) -> float:
    """Return the committed tokens per step of the target, if each step verifies one chain.

    `agreed`: [texts, roots, gamma], whether the guess at each depth below a root is the target's token. The steps go
    through each text from its first root on, as long as a complete chain fits. Raises ValueError if there are no roots.
    """
    texts, roots, gamma = agreed.shape
    if not texts or not roots:
        raise ValueError(f"a chain of {gamma} does not fit the texts: take longer ones")
    walks = [_walked(text) for text in agreed]
    return sum(tokens for _, tokens in walks) / sum(steps for steps, _ in walks)


def committed(agreed: BoolArray, gamma: int = GAMMA) -> tuple[int, int]:
    """Return the target's steps through a text that a drafter drafts chains for, and the tokens of the text.

    `agreed`: [positions]; a chain at the end of the text is shorter.
    """
    steps, _ = _walked(chains_along(np.pad(agreed, (0, gamma - 1))[None], gamma)[0]) if len(agreed) else (0, 0)
    return steps, len(agreed)


def _walked(chains: BoolArray) -> tuple[int, int]:
    """Return the target's steps through a text, and the tokens that they commit. `chains`: [roots, gamma]."""
    runs = np.where(chains.all(-1), chains.shape[-1], chains.argmin(-1)).tolist()
    steps = tokens = 0
    while tokens < len(runs):
        steps += 1
        tokens += runs[tokens] + 1
    return steps, tokens
