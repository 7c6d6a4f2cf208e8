"""Heads on a frozen target: what they learn from windows of a text, and how long chains of theirs are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from outrider.engine.heads.ends import Ends
from outrider.engine.heads.folder import Network
from outrider.engine.heads.shape import Shape
from outrider.training.acceptance import Said, acceptance_length
from outrider.training.objectives import ObjectiveName, objective
from outrider.training.unrolling import unroll


@dataclass(frozen=True, slots=True)
class Terms:
    """What is minimised."""

    objective: ObjectiveName | None  # between target and heads, at each depth; None: the text's cross-entropy alone
    temperature: float = 1.0  # of both in the objective
    text_weight: float = 0.0  # share of the text's cross-entropy
    decay: float = 0.8  # weight of a depth, of the one before: Medusa's lambda (arXiv 2401.10774, section 2.2.1)
    regression: float = 0.0  # weight of EAGLE-1's distance between its states and the target's (arXiv 2401.15077, 4.2)


class Teacher:
    """A frozen target of `transformers`, as heads see it."""

    def __init__(self, model: Any, shape: Shape) -> None:
        """`model`: a causal model that gives its hidden states."""
        self._model = model.eval().requires_grad_(False)
        self._layers = shape.layers
        table, head = model.get_input_embeddings(), model.get_output_embeddings()

        def unembed(states: Tensor) -> Tensor:
            logits: Tensor = head(states.to(head.weight.dtype)).float()
            return logits

        self.ends = Ends(lambda ids: table(ids).float(), unembed, shape.vocabulary)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The features of all rows [texts, tokens, width * parts], and what the target says after each of them
        [texts, tokens, vocabulary]; both in float32."""
        out = self._model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        taken = [out.hidden_states[layer] for layer in self._layers] or [out.hidden_states[-1]]
        return torch.cat(taken, -1).float(), out.logits.float()


def loss_of(network: Network, shape: Shape, teacher: Teacher, windows: Tensor, terms: Terms) -> Tensor:
    """A mean over roots and depths. `windows`: [texts, tokens] ids."""
    features, said = teacher.read(windows)
    judge = None if terms.objective is None else objective(terms.objective)
    total, weights = torch.zeros((), device=windows.device), 0.0
    guesses = unroll(network, shape, teacher.ends, windows, features, shape.depth)
    for depth, guess in enumerate(guesses):
        roots = guess.logits.shape[1]
        of_text = cross_entropy(guess.logits[:, :-1].flatten(0, 1), windows[:, 2 + depth :].flatten())
        loss = of_text
        if judge is not None:
            p, q = said[:, 1 + depth : 1 + depth + roots], guess.logits
            loss = torch.lerp(judge(p / terms.temperature, q / terms.temperature).mean(), of_text, terms.text_weight)
        if terms.regression:
            loss = loss + terms.regression * smooth_l1_loss(guess.states, features[:, 1 + depth :])
        weight = terms.decay**depth
        total, weights = total + weight * loss, weights + weight
    return total / weights


@torch.no_grad()
def acceptance_of(network: Network, shape: Shape, teacher: Teacher, said: Said, gamma: int) -> float:
    """Acceptance length of chains of at most `gamma` guesses on what the target said: see `acceptance`."""
    depth = min(gamma, shape.depth)
    roots = said.answers.shape[1] - depth + 1
    agreed = np.empty((len(said.tokens), roots, depth), np.bool_)
    first = said.prompt - 2  # the row whose root is the prompt's last token
    for text, tokens in enumerate(torch.from_numpy(said.tokens)):
        features, _ = teacher.read(tokens[None])
        for level, guess in enumerate(unroll(network, shape, teacher.ends, tokens[None], features, depth)):
            logits = guess.logits[0, first : first + roots]
            found = said.guesses(text, said.prompt + level, logits)
            agreed[text, :, level] = found == said.answers[text, level : level + roots]
    return acceptance_length(agreed)
