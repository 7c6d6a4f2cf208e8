"""A target that is known by its most likely tokens alone: the rest of its vocabulary counts as one token, the tail.

Both distributions are put into the same buckets, so that every objective of `outrider.training.objectives` holds for
what is left of them. Merging tokens makes no divergence larger (the data-processing inequality), and no agreement less.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-6  # of a tail


def bucketed(ids: Tensor, logprobs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of target and drafter over the target's leading tokens and the tail: [..., k + 1] each.

    `ids`, `logprobs`: [..., k], the target's; what is impossible is -inf. `logits`: [..., vocabulary], the drafter's.
    """
    q = torch.log_softmax(logits.float(), -1).gather(-1, ids)
    q = q.masked_fill(logprobs.isneginf(), -torch.inf)  # an id that only fills the row is in the tail
    return _with_tail(logprobs.float()), _with_tail(q)


def _with_tail(logprobs: Tensor) -> Tensor:
    tail = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(LEAST).log()
    return torch.cat([logprobs.clamp_min(-30.0), tail], -1)
