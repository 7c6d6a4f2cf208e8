"""Training objectives: each is a loss between the target's distribution p and the drafter's distribution q.

All take logits [..., vocabulary] at the same positions, and return the loss of each position [...], in nats or as a
share. The target's logits get no gradient. Sums are in float32.

Sources: Zhou et al., "DistillSpec" (arXiv 2310.08461), section 3, for the divergences; Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding" (arXiv 2408.07978) for the agreement of Gumbel draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

ObjectiveName = Literal["forward-kl", "reverse-kl", "total-variation", "agreement"]
Objective = Callable[[Tensor, Tensor], Tensor]

NAMES: Final[tuple[str, ...]] = get_args(ObjectiveName)
LEAST_LOGPROB = -60.0  # smaller ones count as this, so that no ratio of two probabilities is beyond float32


def forward_kl(target: Tensor, drafter: Tensor) -> Tensor:
    """KL(p || q): the drafter covers all tokens that the target may choose. Plain distillation minimises it."""
    p, q = _log_softmax(target.detach()), _log_softmax(drafter)
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(target: Tensor, drafter: Tensor) -> Tensor:
    """KL(q || p): the drafter concentrates on the tokens that the target is likely to choose."""
    p, q = _log_softmax(target.detach()), _log_softmax(drafter)
    return (q.exp() * (q - p)).sum(-1)


def total_variation(target: Tensor, drafter: Tensor) -> Tensor:
    """TV(p, q), from 0 to 1: the share of drafted tokens that speculative sampling rejects (Leviathan et al., arXiv
    2211.17192, theorem 3.5)."""
    p, q = _log_softmax(target.detach()), _log_softmax(drafter)
    return 0.5 * (p.exp() - q.exp()).abs().sum(-1)


def agreement(target: Tensor, drafter: Tensor) -> Tensor:
    """Minus the logarithm of the probability that two samples with shared Gumbel noise agree, which is
    sum_i 1 / sum_j max(p_j/p_i, q_j/q_i).

    With tokens in falling order of p/q, max(p_j/p_i, q_j/q_i) is p_j/p_i for every j up to i and q_j/q_i after it, so
    two running sums are enough, and no table of all pairs is needed.
    """
    apply: Callable[[Tensor, Tensor], Tensor] = _Agreement.apply
    return apply(_log_softmax(target.detach()), _log_softmax(drafter))


class _Agreement(Function):
    """The agreement with its gradient: that of its terms, by themselves, has quotients beyond float32."""

    @staticmethod
    def forward(context: Any, target: Tensor, drafter: Tensor) -> Tensor:
        """Return the loss of each position from log-probabilities: [..., vocabulary]."""
        target, kept = target.clamp_min(LEAST_LOGPROB), drafter > LEAST_LOGPROB
        drafter = drafter.clamp_min(LEAST_LOGPROB)
        order = _falling(target - drafter)
        log_p, log_q = target.gather(-1, order), drafter.gather(-1, order)
        p, q, ratio = log_p.exp(), log_q.exp(), (log_p - log_q).exp()
        after = q.flip(-1).cumsum(-1).flip(-1).roll(-1, -1)  # the sum of q behind each token
        after[..., -1] = 0.0
        whole = p.cumsum(-1) + after * ratio
        terms, weights = p / whole, ratio / whole  # 1 / sum_j max(...), and that over q
        total = terms.sum(-1, keepdim=True)
        if context.needs_input_grad[1]:
            pulls = terms * weights
            slopes = (pulls * after - q * (pulls.cumsum(-1) - pulls)) / total
            context.save_for_backward(torch.zeros_like(slopes).scatter_(-1, order, slopes) * kept)
        return -total.squeeze(-1).log()

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[None, Tensor]:
        """Return the gradient by the drafter's log-probabilities: [..., vocabulary]."""
        (slopes,) = context.saved_tensors
        return None, -above[0].unsqueeze(-1) * slopes


def _falling(ratios: Tensor) -> Tensor:
    """Return the order of each row's entries, largest first.

    On a CPU NumPy sorts with vector instructions, in a third of torch's time.
    """
    if ratios.device.type != "cpu":
        return ratios.argsort(-1, descending=True)
    return torch.from_numpy(ratios.neg().numpy().argsort(-1))


def objective(name: ObjectiveName) -> Objective:
    """Return the objective with a name."""
    return _BY_NAME[name]


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)


_BY_NAME: dict[ObjectiveName, Objective] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "total-variation": total_variation,
    "agreement": agreement,
}
