"""The objectives are held against their definitions, and the agreement against real draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.training.objectives import NAMES, agreement, objective, total_variation

VOCABULARY = 50


def logits(seed: int, *shape: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def defined(p: Tensor, q: Tensor) -> float:
    """The exact agreement, pair by pair."""
    ratios = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1.0 / ratios.sum(-1)).sum())


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_agreement_equals_its_definition(spread: float) -> None:
    target, drafter = logits(1, spread=spread).double(), logits(2, spread=spread).double()
    expected = -math.log(defined(target.softmax(-1), drafter.softmax(-1)))
    assert float(agreement(target, drafter)) == pytest.approx(expected, rel=1e-4)


def in_float64(target: Tensor, drafter: Tensor) -> Tensor:
    """The agreement by its two running sums, differentiated as they are."""
    p, q = target.double().softmax(-1), drafter.double().softmax(-1)
    order = (p.log() - q.log()).detach().argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    after = q.sum(-1, keepdim=True) - q.cumsum(-1)
    return -(1.0 / (p.cumsum(-1) / p + after.clamp_min(0.0) / q)).sum(-1).log()


@pytest.mark.parametrize(("vocabulary", "spread"), [(50, 0.5), (50, 8.0), (49_152, 4.0), (262_144, 8.0)])
def test_agreement_and_its_gradient_are_those_of_float64(vocabulary: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    target = spread * torch.randn(2, vocabulary, generator=generator)
    drafter = target + 0.3 * spread * torch.randn(2, vocabulary, generator=generator)
    found, expected = drafter.clone().requires_grad_(), drafter.clone().requires_grad_()
    loss, exact = agreement(target, found), in_float64(target, expected)
    assert torch.allclose(loss.double(), exact, rtol=1e-4, atol=1e-5)
    loss.sum().backward()
    exact.sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.allclose(found.grad, expected.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("lowest", [-30.0, -100.0, -1e4])
def test_gradients_are_numbers_down_to_probabilities_of_zero(lowest: float) -> None:
    target, drafter = logits(13, 4), logits(14, 4)
    target[:, :20] += lowest
    drafter = drafter.clone()
    drafter[:, 10:30] += lowest
    drafter.requires_grad_()
    agreement(target, drafter).sum().backward()
    assert drafter.grad is not None
    assert torch.isfinite(drafter.grad).all()
    assert 0.0 < float(drafter.grad.norm()) < 10.0


def test_agreement_is_how_often_draws_with_shared_noise_agree() -> None:
    target, drafter = logits(3), logits(4)
    draws = 200_000
    noise = -torch.rand(draws, VOCABULARY, generator=torch.Generator().manual_seed(5)).log().neg().log()
    same = ((target + noise).argmax(-1) == (drafter + noise).argmax(-1)).double().mean()
    share = math.exp(-float(agreement(target, drafter)))
    assert abs(float(same) - share) < 5 * math.sqrt(share * (1 - share) / draws)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_equal_to_the_target_has_no_loss(name: str) -> None:
    target = logits(6, 3)
    drafter = target.clone().requires_grad_()
    loss = objective(name)(target, drafter)  # type: ignore[arg-type]
    assert loss.shape == (3,)
    assert torch.allclose(loss, torch.zeros(3), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_bring_the_drafter_nearer(name: str) -> None:
    target = logits(7, 4)
    drafter = logits(8, 4).requires_grad_()
    descent = torch.optim.Adam([drafter], lr=0.3)
    losses = []
    for _ in range(100):
        loss = objective(name)(target, drafter).mean()  # type: ignore[arg-type]
        descent.zero_grad()
        loss.backward()
        assert torch.isfinite(drafter.grad).all()  # type: ignore[arg-type]
        descent.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_one_of_the_two_excludes_makes_no_loss_infinite(name: str) -> None:
    target, drafter = logits(9), logits(10)
    target[:10] = -200.0
    drafter = drafter.clone()
    drafter[5:15] = -200.0
    drafter.requires_grad_()
    loss = objective(name)(target, drafter)  # type: ignore[arg-type]
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(drafter.grad).all()  # type: ignore[arg-type]


def test_agreement_is_never_above_one_minus_total_variation() -> None:
    """Daliri et al., section 2: at least (1 - TV) / (1 + TV), and no coupling does better than 1 - TV."""
    target, drafter = logits(11, 100), logits(12, 100)
    agreed, apart = (-agreement(target, drafter)).exp(), total_variation(target, drafter)
    assert bool((agreed <= 1 - apart + 1e-5).all())
    assert bool((agreed >= (1 - apart) / (1 + apart) - 1e-5).all())
