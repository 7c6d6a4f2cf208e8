"""The training task of a drafter: the loss between target and drafter, mixed with the text's cross-entropy."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.training.acceptance import TargetTexts, chain_acceptance_length
from outrider.training.objectives import objective
from outrider.training.recipe import DrafterRecipe
from outrider.training.tasks.rollouts import continued, is_on_policy

# Number of logits that are compared at once. On a CPU they fit into the cache; all logits at once took twice the time.
PART, PART_ON_ACCELERATOR = 1 << 20, 1 << 27

BESIDE = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")  # copied from the target

PartLoss = Callable[[slice, Tensor], Tensor]  # from a slice of positions and their logits to losses: [positions]


class DrafterTask:
    """The TrainingTask of a causal model, from a recipe."""

    kind = "drafter"

    def __init__(self, recipe: DrafterRecipe, target: Any | None) -> None:
        """`target`: the target model, on the drafter's device; None if the objective is the text alone."""
        self._recipe = recipe
        self._target = None if recipe.objective == "text" else target
        self._objective = None if recipe.objective == "text" else objective(recipe.objective)
        self._temperature = recipe.temperature
        self._text_weight = recipe.text_weight

    def loss(self, student: Any, plain: Any, step: int, windows: Tensor) -> Tensor:
        """See `TrainingTask`. In some steps the drafter itself continues the beginnings of the windows."""
        if not is_on_policy(step, self._recipe.on_policy):
            return self.window_loss(student, windows)
        drawn = self._recipe.continuation
        generator = torch.Generator(windows.device).manual_seed(torch.initial_seed())
        return self.window_loss(student, continued(plain, windows[:, :-drawn], drawn, generator), drawn)

    def held_out(self, model: Any, window: Tensor) -> float:
        """Return the cross-entropy, in nats per token."""
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        return float(torch.nn.functional.cross_entropy(logits, window[1:]))

    def acceptance(self, model: Any, texts: TargetTexts) -> float:
        """Return the acceptance length of chains that the model drafts."""

        def logits(tokens: Tensor) -> Tensor:
            after: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits
            return after

        return chain_acceptance_length(logits, texts)

    def write(self, model: Any, source: Path, folder: Path) -> None:
        """Write a checkpoint in Hugging Face format, which any engine loads."""
        save_checkpoint(folder, model, source)

    def window_loss(self, student: Any, windows: Tensor, drawn: int | None = None) -> Tensor:
        """Return the loss, a mean over positions, in nats or as a share. `windows`: [rows, length + 1].

        `drawn`: only this many last tokens count. The drafter has drawn them, so the text's cross-entropy is left out.
        """
        counted = drawn or windows.shape[1] - 1
        read, following = windows[:, :-1], windows[:, -counted:].flatten()
        p = None if self._objective is None else self._target_logits(read)[:, -counted:].flatten(0, 1)
        q = student(input_ids=read, use_cache=False).logits[:, -counted:].flatten(0, 1)

        def of_part(part: slice, logits: Tensor) -> Tensor:
            if self._objective is None or p is None:
                return torch.nn.functional.cross_entropy(logits, following[part], reduction="none")
            distilled = self._objective(p[part].float() / self._temperature, logits / self._temperature)
            if drawn is not None or not self._text_weight:
                return distilled
            text = torch.nn.functional.cross_entropy(logits, following[part], reduction="none")
            return torch.lerp(distilled, text, self._text_weight)

        return in_parts(q, of_part)

    @torch.no_grad()
    def _target_logits(self, read: Tensor) -> Tensor:
        assert self._target is not None
        logits: Tensor = self._target(input_ids=read, use_cache=False).logits
        return logits


def in_parts(logits: Tensor, loss_of: PartLoss) -> Tensor:
    """Return the mean of a loss over positions. `logits`: [positions, vocabulary]."""
    loss: Tensor = _InParts.apply(logits, loss_of)  # type: ignore[no-untyped-call]
    return loss


class _InParts(torch.autograd.Function):
    """The mean of a loss over positions.

    Loss and gradient are computed part by part, so that only one part's intermediate results are in memory: with a
    vocabulary of 128,000 tokens, those of all positions would take gigabytes.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss_of: PartLoss) -> Tensor:
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
    """Write the model in bfloat16, with copies of `source`'s tokenizer and configuration files."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    for pattern in BESIDE:
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)
