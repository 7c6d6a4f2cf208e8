"""Losses are those of whole texts, in parts or not; the drafter's own tokens are drawn from its distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.training.objectives import objective
from outrider.training.tasks import drafter_task as lessons_
from outrider.training.tasks.drafter_task import DrafterTask
from outrider.training.tasks.rollouts import continued, is_on_policy
from outrider.training.tasks.student_init import load
from tests.training.family import recipe


@pytest.fixture(scope="module")
def models(target: Path) -> tuple[Any, Any]:
    """A target, and a drafter that is another model."""
    student = load(target, "float32").model
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return load(target, "float32").model, student


def gradient(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("part", [1, 1000, 1 << 20])
@pytest.mark.parametrize("drawn", [None, 7])
def test_a_loss_in_parts_is_that_of_the_whole(
    models: tuple[Any, Any], drawn: int | None, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons_, "PART", part)
    target, student = models
    settings = recipe(Path("t"), Path("o"), objective="total-variation", text_weight=0.25, temperature=0.7)
    windows = torch.randint(0, 300, (3, 21), generator=torch.Generator().manual_seed(2))
    loss = DrafterTask(settings, target).window_loss(student, windows, drawn)
    counted = drawn or 20
    q = student(input_ids=windows[:, :-1]).logits[:, -counted:]
    with torch.no_grad():
        p = target(input_ids=windows[:, :-1]).logits[:, -counted:]
    expected = objective("total-variation")(p / 0.7, q / 0.7).mean()
    if drawn is None:
        text = torch.nn.functional.cross_entropy(q.flatten(0, 1), windows[:, 1:].flatten())
        expected = 0.75 * expected + 0.25 * text
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient(student, loss), gradient(student, expected), atol=1e-6)


def test_text_alone_is_cross_entropy_and_asks_no_target(models: tuple[Any, Any]) -> None:
    _, student = models
    windows = torch.randint(0, 300, (2, 11), generator=torch.Generator().manual_seed(3))
    loss = DrafterTask(recipe(Path("t"), Path("o"), objective="text"), None).window_loss(student, windows)
    logits = student(input_ids=windows[:, :-1]).logits
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item(), rel=1e-5
    )


def test_the_drafter_s_tokens_are_drawn_from_its_distributions_over_the_whole_text(models: tuple[Any, Any]) -> None:
    """The cache changes nothing: drawn again with the same dice from passes over the whole text, it is the same."""
    _, student = models
    student.train()
    prompts = torch.randint(0, 300, (3, 9), generator=torch.Generator().manual_seed(4))
    generated = continued(student, prompts, 12, torch.Generator().manual_seed(5))
    assert student.training
    assert generated.shape == (3, 21)
    dice, text = torch.Generator().manual_seed(5), prompts
    for _ in range(12):
        with torch.no_grad():
            q = student(input_ids=text, use_cache=False).logits[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(q, 1, generator=dice)], 1)
    assert torch.equal(generated, text)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_drafter_s_own_tokens_are_used_in_the_share_of_steps_that_was_asked_for(share: float) -> None:
    own = [is_on_policy(step, share) for step in range(400)]
    assert sum(own) == 400 * share
    assert all(sum(own[first : first + 4]) == 4 * share for first in range(0, 400, 4))
