"""Heads on a frozen target: what they learn from windows of a text, and how long chains of theirs are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from outrider.engine.checkpoint import read_config
from outrider.engine.heads.ends import Ends
from outrider.engine.heads.folder import make_network, save_network
from outrider.engine.heads.loading import check_family
from outrider.engine.heads.shape import Shape, shape_for
from outrider.engine.pretrained import Pretrained
from outrider.training.acceptance import GAMMA, Said, acceptance_length
from outrider.training.lessons import in_parts
from outrider.training.objectives import objective
from outrider.training.recipe import HeadsRecipe
from outrider.training.unrolling import Unrolled

REGRESSION = 1.0  # of EAGLE-1, whose states are fed back as if they were the target's features


def make_heads(recipe: HeadsRecipe, target: Pretrained, folder: Path) -> Unrolled:
    """Heads of random weights for that target, which is of the Llama family. Raises ConfigError and CheckpointError."""
    check_family(folder)
    torch.manual_seed(recipe.seed)
    shape = shape_for(
        recipe.kind, read_config(folder), depth=recipe.depth, own_head=recipe.own_head, inner=recipe.inner or 0
    )
    return Unrolled(make_network(shape), shape, ends_of(target.model, shape))


def ends_of(model: Any, shape: Shape) -> Ends:
    """Embedding and unembedding of a model of `transformers`."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()

    def unembed(states: Tensor) -> Tensor:
        logits: Tensor = head(states.to(head.weight.dtype))
        return logits

    return Ends(lambda ids: table(ids).float(), unembed, shape.vocabulary, shape.vocabulary)


class HeadLessons:
    """Of heads that learn from what the target says at each depth below each root of a text."""

    def __init__(self, recipe: HeadsRecipe, shape: Shape, target: Any) -> None:
        """`target`: the model, on the heads' device."""
        self.kind: str = recipe.kind
        self._recipe = recipe
        self._shape = shape
        self._target = target.eval().requires_grad_(False)
        self._objective = None if recipe.objective == "text" else objective(recipe.objective)
        of_kind = REGRESSION if recipe.kind == "eagle" else 0.0
        self._regression = of_kind if recipe.regression is None else recipe.regression

    def loss(self, pupil: Any, plain: Any, step: int, windows: Tensor) -> Tensor:
        """As `Lessons` has it: a mean over depths, the deeper the less, and over roots."""
        features, said = self._read(windows)
        total, weights = torch.zeros((), device=windows.device), 0.0
        for depth, guess in enumerate(pupil(windows, features)):
            loss = self._taught(guess.logits, said[:, 1 + depth :], windows[:, 2 + depth :])
            if self._regression:
                loss = loss + self._regression * smooth_l1_loss(guess.states.float(), features[:, 1 + depth :])
            weight = self._recipe.decay**depth  # Medusa's lambda (arXiv 2401.10774, section 2.2.1)
            total, weights = total + weight * loss, weights + weight
        return total / weights

    def held_out(self, plain: Any, window: Tensor) -> float:
        """The same."""
        return float(self.loss(plain, plain, 0, window[None]))

    def acceptance(self, plain: Any, said: Said) -> float:
        """Of chains as long as they guess, and GAMMA at most."""
        depth = min(GAMMA, self._shape.depth)
        roots = said.answers.shape[1] - depth + 1
        agreed = np.empty((len(said.tokens), roots, depth), np.bool_)
        first = said.prompt - 2  # the row whose root is the prompt's last token
        device = next(plain.parameters()).device
        for text, tokens in enumerate(torch.from_numpy(said.tokens).to(device)):
            features, _ = self._read(tokens[None])
            for level, guess in enumerate(plain(tokens[None], features)[:depth]):
                found = said.guesses(text, said.prompt + level, guess.logits[0, first : first + roots])
                agreed[text, :, level] = found == said.answers[text, level : level + roots]
        return acceptance_length(agreed)

    def write(self, plain: Any, source: Path, folder: Path) -> None:
        """A folder of heads."""
        save_network(folder, self._shape, plain.network)

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The features of all rows [texts, tokens, width * parts] in float32, and what the target says after each of
        them [texts, tokens, vocabulary]."""
        out = self._target(input_ids=tokens, output_hidden_states=True, use_cache=False)
        taken = [out.hidden_states[layer] for layer in self._shape.layers] or [out.hidden_states[-1]]
        return torch.cat(taken, -1).float(), out.logits

    def _taught(self, guessed: Tensor, said: Tensor, following: Tensor) -> Tensor:
        """The loss of one depth. The last root has no text behind its chain: there the target alone teaches."""
        recipe, judge = self._recipe, self._objective
        ids = torch.nn.functional.pad(following, (0, 1), value=-1).flatten()
        p = said.flatten(0, 1)

        def of_part(part: slice, logits: Tensor) -> Tensor:
            text = cross_entropy(logits, ids[part], reduction="none", ignore_index=-1)
            if judge is None:
                return text
            taught = judge(p[part].float() / recipe.temperature, logits / recipe.temperature)
            return torch.lerp(taught, text, recipe.text_weight)

        return in_parts(guessed.flatten(0, 1), of_part)
