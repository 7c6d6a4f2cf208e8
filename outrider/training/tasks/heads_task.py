"""The training task of heads on a frozen target: their loss on windows of a text, and their acceptance length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.heads.checkpoint_io import make_network, save_network
from outrider.engine.heads.config import HeadsConfig, make_heads_config
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.loading import check_family
from outrider.engine.transformers.pretrained import Pretrained
from outrider.training.acceptance import GAMMA, TargetTexts, acceptance_length
from outrider.training.objectives import objective
from outrider.training.recipe import HeadsRecipe
from outrider.training.tasks.drafter_task import in_parts
from outrider.training.tasks.head_unroll import UnrolledHeads

REGRESSION = 1.0  # default weight for EAGLE-1, whose states are fed back in place of the target's features


def make_heads(recipe: HeadsRecipe, target: Pretrained, folder: Path) -> UnrolledHeads:
    """Return heads with random weights for a target of the Llama family. Raises ConfigError and CheckpointError."""
    check_family(folder)
    torch.manual_seed(recipe.seed)
    shape = make_heads_config(
        recipe.kind, read_config(folder), depth=recipe.depth, own_head=recipe.own_head, inner=recipe.inner or 0
    )
    return UnrolledHeads(make_network(shape), shape, embeddings_of(target.model, shape))


def embeddings_of(model: Any, shape: HeadsConfig) -> TargetEmbeddings:
    """Return the embedding and unembedding of a model of `transformers`."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()

    def unembed(states: Tensor) -> Tensor:
        logits: Tensor = head(states.to(head.weight.dtype))
        return logits

    return TargetEmbeddings(lambda ids: table(ids).float(), unembed, shape.vocabulary, shape.vocabulary)


class HeadsTask:
    """The TrainingTask of heads: at each depth below each root of a text they learn the target's distribution."""

    def __init__(self, recipe: HeadsRecipe, shape: HeadsConfig, target: Any) -> None:
        """`target`: the model, on the heads' device."""
        self.kind: str = recipe.kind
        self._recipe = recipe
        self._shape = shape
        self._target = target.eval().requires_grad_(False)
        self._objective = None if recipe.objective == "text" else objective(recipe.objective)
        default = REGRESSION if recipe.kind == "eagle" else 0.0
        self._regression = default if recipe.regression is None else recipe.regression

    def loss(self, student: Any, plain: Any, step: int, windows: Tensor) -> Tensor:
        """See `TrainingTask`. The loss is a mean over roots and a weighted mean over depths; deeper ones weigh less."""
        features, target_logits = self._read(windows)
        total, weights = torch.zeros((), device=windows.device), 0.0
        for depth, guess in enumerate(student(windows, features)):
            loss = self._depth_loss(guess.logits, target_logits[:, 1 + depth :], windows[:, 2 + depth :])
            if self._regression:
                loss = loss + self._regression * smooth_l1_loss(guess.states.float(), features[:, 1 + depth :])
            weight = self._recipe.decay**depth  # Medusa's lambda (arXiv 2401.10774, section 2.2.1)
            total, weights = total + weight * loss, weights + weight
        return total / weights

    def held_out(self, plain: Any, window: Tensor) -> float:
        """Return the training loss on the window."""
        return float(self.loss(plain, plain, 0, window[None]))

    def acceptance(self, plain: Any, texts: TargetTexts) -> float:
        """Return the acceptance length of chains as deep as the heads guess, at most GAMMA."""
        depth = min(GAMMA, self._shape.depth)
        roots = texts.answers.shape[1] - depth + 1
        agreed = np.empty((len(texts.tokens), roots, depth), np.bool_)
        first = texts.prompt - 2  # the row whose root is the prompt's last token
        device = next(plain.parameters()).device
        for text, tokens in enumerate(torch.from_numpy(texts.tokens).to(device)):
            features, _ = self._read(tokens[None])
            for level, guess in enumerate(plain(tokens[None], features)[:depth]):
                found = texts.guesses(text, texts.prompt + level, guess.logits[0, first : first + roots])
                agreed[text, :, level] = found == texts.answers[text, level : level + roots]
        return acceptance_length(agreed)

    def write(self, plain: Any, source: Path, folder: Path) -> None:
        """Write a folder of heads."""
        save_network(folder, self._shape, plain.network)

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of all rows in float32 [texts, tokens, width * parts], and the target's logits after each
        row [texts, tokens, vocabulary]."""
        out = self._target(input_ids=tokens, output_hidden_states=True, use_cache=False)
        taken = [out.hidden_states[layer] for layer in self._shape.layers] or [out.hidden_states[-1]]
        return torch.cat(taken, -1).float(), out.logits

    def _depth_loss(self, guessed: Tensor, target_logits: Tensor, following: Tensor) -> Tensor:
        """Return the loss of one depth. The last root has no text after its chain, so only the target counts there."""
        recipe, divergence = self._recipe, self._objective
        ids = torch.nn.functional.pad(following, (0, 1), value=-1).flatten()
        p = target_logits.flatten(0, 1)

        def of_part(part: slice, logits: Tensor) -> Tensor:
            text = cross_entropy(logits, ids[part], reduction="none", ignore_index=-1)
            if divergence is None:
                return text
            distilled = divergence(p[part].float() / recipe.temperature, logits / recipe.temperature)
            return torch.lerp(distilled, text, recipe.text_weight)

        return in_parts(guessed.flatten(0, 1), of_part)
