"""A target that is known by its most likely tokens alone. How much is left for the others is known, not how it is
shared out: another model's word is taken for that, and what remains counts as one token, the tail.

Both distributions are put into the same buckets, so that every objective of `outrider.training.objectives` holds for
what is left of them. Merging tokens makes no divergence larger (the data-processing inequality), and no agreement less.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-6  # of a tail
MORE = 112  # tokens by another model's word


def filled(ids: Tensor, logprobs: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The target's leading tokens and `MORE` further ones, the likeliest by `other`: [..., k + MORE] each.

    `ids`, `logprobs`: [..., k], the target's. `other`: [..., vocabulary], the logits of a model that is much like it;
    what it thinks of the tokens that are no leading ones shares out what these leave.
    """
    said = torch.log_softmax(other.float(), -1)
    its_tail = said.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp_min(LEAST).log()
    further = said.scatter(-1, ids, -torch.inf).topk(min(MORE, other.shape[-1] - ids.shape[-1]), -1)
    more = further.values - its_tail + _tail(logprobs.float())
    return torch.cat([ids, further.indices], -1), torch.cat([logprobs.float(), more], -1)


def bucketed(ids: Tensor, logprobs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of target and drafter over the target's leading tokens and the tail: [..., k + 1] each.

    `ids`, `logprobs`: [..., k], the target's; what is impossible is -inf. `logits`: [..., vocabulary], the drafter's.
    """
    q = torch.log_softmax(logits.float(), -1).gather(-1, ids)
    q = q.masked_fill(logprobs.isneginf(), -torch.inf)  # an id that only fills the row is in the tail
    return _with_tail(logprobs.float()), _with_tail(q)


def _with_tail(logprobs: Tensor) -> Tensor:
    return torch.cat([logprobs.clamp_min(-30.0), _tail(logprobs)], -1)


def _tail(logprobs: Tensor) -> Tensor:
    """Of what these leave: [..., 1]."""
    return (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(LEAST).log()
