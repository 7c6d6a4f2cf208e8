"""Faults of vLLM 0.32's verification of drafts on processors, whoever drafts, put right while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler

_constraints = rejection_sampler.apply_sampling_constraints


def repair() -> None:
    """Put right what is wrong."""
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = _apply_sampling_constraints


def _expand_batch_to_tokens(
    values: Tensor, ends: Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return each request's value for each of its drafts: [count]. `ends`: [requests] running total of drafts.

    vLLM's own writes into a copy, so that temperatures and filters are those of memory that nobody wrote (its issue
    55005).
    """
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return torch.repeat_interleave(values, torch.diff(ends, prepend=ends.new_zeros(1)).long(), output_size=count)


def _apply_sampling_constraints(logits: Tensor, ends: Tensor, sampling: Any) -> Tensor:
    """Filter the logits of drafts: [drafts, vocabulary]. vLLM's own ends the server where a step has none."""
    return _constraints(logits, ends, sampling) if len(logits) else logits
