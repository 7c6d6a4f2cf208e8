"""What a step learns from some windows: the loss between target and drafter, and a little of the text's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.training.objectives import objective
from outrider.training.recipe import DrafterRecipe

# Logits that are compared at once. On a CPU they stay in its cache: a step with all at once took twice the time.
PART, PART_ON_ACCELERATOR = 1 << 20, 1 << 27

LossOf = Callable[[slice, Tensor], Tensor]  # of some positions, from their logits: [positions]


class Lessons:
    """The loss of windows, as a recipe has it."""

    def __init__(self, recipe: DrafterRecipe, target: Any | None) -> None:
        """`target`: the model that teaches, on the drafter's device; None where the text alone does."""
        self._target = None if recipe.objective == "text" else target
        self._objective = None if recipe.objective == "text" else objective(recipe.objective)
        self._temperature = recipe.temperature
        self._text_weight = recipe.text_weight

    def loss(self, student: Any, windows: Tensor, said: int | None = None) -> Tensor:
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

        loss: Tensor = _InParts.apply(q, of_part)  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()
    def _judged(self, read: Tensor) -> Tensor:
        assert self._target is not None
        logits: Tensor = self._target(input_ids=read, use_cache=False).logits
        return logits


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
