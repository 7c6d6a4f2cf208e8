"""What a drafter learns from some windows: the loss between target and drafter, and a little of the text's own."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.training.acceptance import Said, of_model
from outrider.training.objectives import objective
from outrider.training.recipe import DrafterRecipe
from outrider.training.rollouts import continued, is_own

# Logits that are compared at once. On a CPU they stay in its cache: a step with all at once took twice the time.
PART, PART_ON_ACCELERATOR = 1 << 20, 1 << 27

BESIDE = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")  # as the target has it

LossOf = Callable[[slice, Tensor], Tensor]  # of some positions, from their logits: [positions]


class DrafterLessons:
    """A causal model's, as a recipe has them."""

    kind = "drafter"

    def __init__(self, recipe: DrafterRecipe, target: Any | None) -> None:
        """`target`: the model that teaches, on the drafter's device; None where the text alone does."""
        self._recipe = recipe
        self._target = None if recipe.objective == "text" else target
        self._objective = None if recipe.objective == "text" else objective(recipe.objective)
        self._temperature = recipe.temperature
        self._text_weight = recipe.text_weight

    def loss(self, student: Any, plain: Any, step: int, windows: Tensor) -> Tensor:
        """As `Lessons` has it. In some steps the drafter itself goes on with the windows' beginnings."""
        if not is_own(step, self._recipe.on_policy):
            return self.taught(student, windows)
        said = self._recipe.continuation
        dice = torch.Generator(windows.device).manual_seed(torch.initial_seed())
        return self.taught(student, continued(plain, windows[:, :-said], said, dice), said)

    def held_out(self, model: Any, window: Tensor) -> float:
        """The cross-entropy, in nats a token."""
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        return float(torch.nn.functional.cross_entropy(logits, window[1:]))

    def acceptance(self, model: Any, said: Said) -> float:
        """Of chains that the model drafts."""

        def logits(tokens: Tensor) -> Tensor:
            after: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits
            return after

        return of_model(logits, said)

    def write(self, model: Any, source: Path, folder: Path) -> None:
        """A checkpoint in Hugging Face format, which any engine loads."""
        save_checkpoint(folder, model, source)

    def taught(self, student: Any, windows: Tensor, said: int | None = None) -> Tensor:
        """A mean over positions, in nats or as a share. `windows`: [rows, length + 1].

        `said`: only the last so many tokens count. The drafter has drawn them, so that they are no text to learn from.
        """
        counted = said or windows.shape[1] - 1
        read, following = windows[:, :-1], windows[:, -counted:].flatten()
        p = None if self._objective is None else self._judged(read)[:, -counted:].flatten(0, 1)
        q = student(input_ids=read, use_cache=False).logits[:, -counted:].flatten(0, 1)

        def of_part(part: slice, logits: Tensor) -> Tensor:
            if self._objective is None or p is None:
                return torch.nn.functional.cross_entropy(logits, following[part], reduction="none")
            taught = self._objective(p[part].float() / self._temperature, logits / self._temperature)
            if said is not None or not self._text_weight:
                return taught
            text = torch.nn.functional.cross_entropy(logits, following[part], reduction="none")
            return torch.lerp(taught, text, self._text_weight)

        return in_parts(q, of_part)

    @torch.no_grad()
    def _judged(self, read: Tensor) -> Tensor:
        assert self._target is not None
        logits: Tensor = self._target(input_ids=read, use_cache=False).logits
        return logits


def in_parts(logits: Tensor, loss_of: LossOf) -> Tensor:
    """The mean of a loss over positions. `logits`: [positions, vocabulary]."""
    loss: Tensor = _InParts.apply(logits, loss_of)  # type: ignore[no-untyped-call]
    return loss


class _InParts(torch.autograd.Function):
    """The mean of a loss over positions. Loss and gradient of a part are computed together, so that no more than a
    part's intermediate results are ever there: for 128,000 tokens of a vocabulary all of them would be gigabytes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss_of: LossOf) -> Tensor:
        """`logits`: [positions, vocabulary]."""
        positions, vocabulary = logits.shape
        size = max(1, (PART if logits.device.type == "cpu" else PART_ON_ACCELERATOR) // vocabulary)
        total = torch.zeros((), device=logits.device)
        gradient = torch.empty_like(logits)
        for first in range(0, positions, size):
            part = slice(first, first + size)
            with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
                given = logits[part].detach().float().requires_grad_()
                loss = loss_of(part, given).sum() / positions
                (slope,) = torch.autograd.grad(loss, given)
            gradient[part] = slope
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * slopes[0], None


def save_checkpoint(folder: Path, model: Any, source: Path) -> None:
    """The model in bfloat16, and what goes beside its weights as `source` has it."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    for pattern in BESIDE:
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)
