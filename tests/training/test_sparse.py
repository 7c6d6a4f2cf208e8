"""What is left of a distribution that is known by its leading tokens alone."""

import pytest
import torch

from outrider.training.objectives import agreement, forward_kl
from outrider.training.sparse import bucketed, filled

GENERATOR = torch.Generator().manual_seed(0)
TARGET, DRAFTER = (torch.randn(3, 40, generator=GENERATOR) * 2 for _ in range(2))


def leading(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.log_softmax(TARGET, -1).topk(k)
    return top.indices, top.values


def test_p_and_q_are_whole_distributions_over_the_leading_tokens_and_the_tail() -> None:
    p, q = bucketed(*leading(5), DRAFTER)
    assert p.shape == q.shape == (3, 6)
    assert torch.allclose(p.exp().sum(-1), torch.ones(3))
    assert torch.allclose(q.exp().sum(-1), torch.ones(3))
    assert torch.allclose(q[:, :5], torch.log_softmax(DRAFTER, -1).gather(-1, leading(5)[0]))


def test_all_leading_tokens_keep_the_divergence_and_fewer_never_increase_it() -> None:
    whole = forward_kl(TARGET, DRAFTER)
    assert torch.allclose(forward_kl(*bucketed(*leading(40), DRAFTER)), whole, atol=1e-4)
    for k in (1, 4, 16):
        assert (forward_kl(*bucketed(*leading(k), DRAFTER)) <= whole + 1e-5).all()
        assert (agreement(*bucketed(*leading(k), DRAFTER)) <= agreement(TARGET, DRAFTER) + 1e-5).all()


def test_the_sparse_loss_falls_along_its_gradient() -> None:
    logits = DRAFTER.clone().requires_grad_()
    ids, logprobs = leading(16)
    before = forward_kl(*bucketed(ids, logprobs, logits)).mean()
    (gradient,) = torch.autograd.grad(before, logits)
    assert forward_kl(*bucketed(ids, logprobs, logits - 2.0 * gradient)).mean() < before


def test_the_unknown_rest_of_the_target_is_filled_in_from_another_model() -> None:
    ids, logprobs = filled(*leading(5), TARGET)  # the other model is the target itself
    assert ids.shape == (3, 40)
    assert torch.allclose(logprobs, torch.log_softmax(TARGET, -1).gather(-1, ids), atol=1e-4)
    ids, logprobs = filled(*leading(5), DRAFTER)
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(3), atol=1e-4)
    assert torch.equal(logprobs[:, :5], leading(5)[1])
    assert torch.allclose(logprobs[:, 5:].diff(), DRAFTER.gather(-1, ids[:, 5:]).diff(), atol=1e-4)


def test_alternatives_that_only_fill_a_row_count_for_nothing() -> None:
    ids, logprobs = torch.tensor([[3, 0, 0]]), torch.tensor([[-0.5, -torch.inf, -torch.inf]])
    p, q = bucketed(ids, logprobs, torch.zeros(1, 8))
    assert p.exp()[0].tolist() == pytest.approx([0.6065, 0.0, 0.0, 0.3935], abs=1e-3)
    assert q.exp()[0].tolist() == pytest.approx([0.125, 0.0, 0.0, 0.875], abs=1e-3)
