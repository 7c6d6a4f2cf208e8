"""Acceptance length of a drafter on texts that the target itself said: exact, and no cluster is needed for it.

Under shared noise a drafted token is accepted if and only if it is the target's own, so on a text of the target's it is
enough to ask at each position what the drafter would have put first. A chain of gamma guesses then brings as many
tokens as agree from its root on, and the target's own behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.contract import Contract
from outrider.core.noise import FloatRow, gumbel_row
from outrider.core.sampler import Sampler
from outrider.engine.batch import Segment
from outrider.engine.engine import Engine

GAMMA = 8  # guesses of a chain
CHUNK = 128  # tokens of all prompts that are read in one pass, about

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Said:
    """Texts of one length that a target said, each under the noise of its own seed."""

    tokens: NDArray[np.int64]  # [texts, prompt + answer]
    prompt: int  # tokens before the answer
    temperature: float
    seeds: tuple[int, ...]

    @property
    def answers(self) -> NDArray[np.int64]:
        """What was said: [texts, answer]."""
        return self.tokens[:, self.prompt :]

    def guesses(self, text: int, first: int, logits: Tensor) -> NDArray[np.int64]:
        """What whoever says these logits [rows, vocabulary] would put first at each of a text's positions from `first`
        on: [rows]."""
        scores: FloatRow = logits.detach().double().cpu().numpy()  # [rows, vocabulary]
        if self.temperature > 0.0:
            scores /= self.temperature
            for row, score in enumerate(scores):
                score += gumbel_row(self.seeds[text], 0, first + row, scores.shape[-1])
        guessed: NDArray[np.int64] = scores.argmax(-1)
        return guessed


def say(engine: Engine, prompts: Sequence[Sequence[int]], *, temperature: float, tokens: int, seed: int) -> Said:
    """What a target says after prompts of one length, `tokens` each; an end of text does not end it.

    The engine must have a slot for each. Raises ValueError where it has not, or where the prompts differ in length.
    """
    (length,) = {len(prompt) for prompt in prompts}
    seeds = tuple(seed + text for text in range(len(prompts)))
    samplers = [
        Sampler(Contract(seed=own, max_tokens=tokens, temperature=temperature), engine.vocabulary, prompt, length)
        for own, prompt in zip(seeds, prompts, strict=True)
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
    return Said(np.array(texts, np.int64), length, temperature, seeds)


def of_model(logits: Callable[[Tensor], Tensor], said: Said, gamma: int = GAMMA) -> float:
    """Acceptance length of a causal model that drafts chains: `logits` takes ids [1, tokens], and gives what the model
    says after each of them: [1, tokens, vocabulary]."""
    agreed = np.empty(said.answers.shape, np.bool_)
    for text, tokens in enumerate(torch.from_numpy(said.tokens)):
        with torch.no_grad():
            after = logits(tokens[None, :-1])[0, said.prompt - 1 :]
        agreed[text] = said.guesses(text, said.prompt, after) == said.answers[text]
    return acceptance_length(in_turn(agreed, gamma))


def in_turn(agreed: BoolArray, gamma: int) -> BoolArray:
    """Which guesses of a chain from each root agree, for a drafter that says the same wherever a chain began.

    `agreed`: [texts, positions]; gives [texts, roots, gamma], of the roots whose chain lies within the text.
    """
    return np.lib.stride_tricks.sliding_window_view(agreed, gamma, axis=1)


def acceptance_length(agreed: BoolArray) -> float:
    """Committed tokens for each step of the target, when each step verifies one chain.

    `agreed`: [texts, roots, gamma], whether the guess at each depth below a root is what the target said there. A text
    is walked through from its first root on, as far as whole chains go. Raises ValueError when there are no roots.
    """
    texts, roots, gamma = agreed.shape
    if not texts or not roots:
        raise ValueError(f"a chain of {gamma} does not fit the texts: take longer ones")
    runs = np.where(agreed.all(-1), gamma, agreed.argmin(-1))
    steps = tokens = 0
    for text in runs:
        root = 0
        while root < roots:
            steps += 1
            tokens += int(text[root]) + 1
            root += int(text[root]) + 1
    return tokens / steps
