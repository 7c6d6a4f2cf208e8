"""Objectives on a target of which only the likeliest tokens are known.

The total probability of the other tokens is known, but not how it is distributed. Another model estimates that for some
of them, and the rest counts as one token, the tail. Both distributions use the same buckets, so every objective of
`outrider.training.objectives` applies to them. Merging tokens makes no divergence larger (the data-processing
inequality) and no agreement smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.training.objectives import LEAST_LOGPROB

MIN_TAIL = 1e-6  # smallest probability of a tail
MORE = 112  # further tokens whose probabilities another model estimates


def filled(ids: Tensor, logprobs: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities of the target's leading tokens and `MORE` further ones: [..., k + MORE] each.

    `ids`, `logprobs`: [..., k], the target's leading tokens. `other`: [..., vocabulary], the logits of a similar model.
    The further tokens are its likeliest ones; they share the target's remaining probability in its proportions.
    """
    estimate = torch.log_softmax(other.float(), -1)
    its_tail = estimate.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp_min(MIN_TAIL).log()
    further = estimate.scatter(-1, ids, -torch.inf).topk(min(MORE, other.shape[-1] - ids.shape[-1]), -1)
    more = further.values - its_tail + _tail(logprobs.float())
    return torch.cat([ids, further.indices], -1), torch.cat([logprobs.float(), more], -1)


def bucketed(ids: Tensor, logprobs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of target and drafter over the target's leading tokens and the tail: [..., k + 1].

    `ids`, `logprobs`: [..., k], the target's; impossible tokens have -inf. `logits`: [..., vocabulary], the drafter's.
    """
    q = torch.log_softmax(logits.float(), -1).gather(-1, ids)
    q = q.masked_fill(logprobs.isneginf(), -torch.inf)  # an id that only fills the row is in the tail
    return _with_tail(logprobs.float()), _with_tail(q)


def listed(ids: Tensor, logprobs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `bucketed` does, but for a target that chooses no other tokens: the drafter's tail is lost.

    With 64 leading tokens that is nearly so, and a drafter must not be taught to agree on a token that nobody knows.
    """
    p, q = bucketed(ids, logprobs, logits)
    return torch.cat([p[..., :-1], torch.full_like(p[..., -1:], LEAST_LOGPROB)], -1), q


def _with_tail(logprobs: Tensor) -> Tensor:
    return torch.cat([logprobs.clamp_min(-30.0), _tail(logprobs)], -1)


def _tail(logprobs: Tensor) -> Tensor:
    """Return the log-probability of all other tokens: [..., 1]."""
    return (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(MIN_TAIL).log()
