"""The training task of a drafter that learns from the texts that its target wrote, with what the target knew then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.training.acceptance import BoolArray, first_choices
from outrider.training.answers.answer_store import TargetAnswer
from outrider.training.objectives import objective
from outrider.training.positions import Positions
from outrider.training.recipe import DrafterRecipe
from outrider.training.sparse import listed
from outrider.training.tasks.drafter_task import in_parts, save_checkpoint


class AnswersTask:
    """The TrainingTask of a causal model on answers; no pass of the target is needed."""

    kind = "drafter"

    def __init__(self, recipe: DrafterRecipe, draft_ids: tuple[int, ...]) -> None:
        """`draft_ids`: of a reduced vocabulary; empty: the whole."""
        assert recipe.objective != "text"  # the recipe checks this
        self._objective = objective(recipe.objective)
        self._temperature = recipe.temperature
        self._draft_ids = np.array(draft_ids, np.int64) if draft_ids else None

    def loss(self, student: Any, plain: Any, step: int, windows: Positions) -> Tensor:
        """See `TrainingTask`. A position counts by the probability of those of the target's tokens that are known."""
        known = windows.logprobs.exp().sum(-1)

        def of_part(part: slice, logits: Tensor) -> Tensor:
            p, q = listed(windows.ids[part], windows.logprobs[part] / self._temperature, logits / self._temperature)
            return self._objective(p, q) * known[part]

        return in_parts(windows.logits(student), of_part)

    def held_out(self, plain: Any, window: Positions) -> float:
        """Return the loss on texts."""
        return float(self.loss(plain, plain, 0, window))

    def agreed(self, plain: Any, text: TargetAnswer) -> BoolArray:
        """Return at which tokens of an answer the model's first choice under the shared noise is the target's."""
        tokens = torch.from_numpy(text.tokens.astype(np.int64))
        logits = plain(tokens[None, :-1].to(plain.device), use_cache=False).logits[0, text.answer - 1 :]
        guessed = first_choices(logits, text.seed, text.temperature, text.answer, self._draft_ids)
        found: BoolArray = guessed == tokens[text.answer :].numpy()
        return found

    def write(self, plain: Any, source: Path, folder: Path) -> None:
        """Write a checkpoint that drafters load."""
        save_checkpoint(folder, plain, source)
