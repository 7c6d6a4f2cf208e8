"""Shared noise and the choice of tokens, computed on the device. `outrider.core.sampling.noise` defines both.

Integers have 64 bits and wrap around, so the random bits are the same on all devices. Logarithms are computed in
float64, where devices differ by an ulp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.session.digest import PHI

FEW = 8  # candidates up to which equal scores are ordered by token id
_LARGEST_U = 1.0 - 2.0**-24


def noise_steps(vocabulary: int, device: torch.device) -> Tensor:
    """Return what each token adds to the noise key of a row: [vocabulary] int64."""
    return torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device) * signed(PHI)


def noise_bits(keys: Tensor, steps: Tensor) -> Tensor:
    """Return 32 random bits for each token of each row: [rows] and [vocabulary] int64 -> [rows, vocabulary] int64."""
    return _shifted(mixed(keys[:, None] + steps), 32)


def mixed(value: Tensor) -> Tensor:
    """Return what `mix64` makes of each int64."""
    value = (value ^ _shifted(value, 30)) * signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel noise from random bits: float64."""
    u = ((bits.double() + 0.5) * 2.0**-32).clamp_max(_LARGEST_U)
    return -torch.log(-torch.log1p(-u))


def scores(logits: Tensor, keys: Tensor, temperatures: Tensor, steps: Tensor) -> Tensor:
    """Return log p + g up to a constant: [rows, vocabulary] float64.

    `temperatures`: [rows] float64; at 0 the scores are the logits.
    """
    greedy = temperatures == 0.0
    noise = gumbel(noise_bits(keys, steps))
    warm = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    return torch.where(greedy[:, None], warm, warm + noise)


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of each row, best first, and their scores: [rows, count] each.

    Up to `FEW` tokens, whose first may be the row's choice, the lowest id wins a tie: one pass over the row for each,
    because `topk` promises no order among equal scores. More tokens are candidates, whose order among equal scores does
    not matter.
    """
    if count > FEW:
        values, tokens = scores.topk(count)
        return tokens, values
    firsts, leads = [], []
    for _ in range(count):
        token = scores.argmax(-1, keepdim=True)
        firsts.append(token)
        leads.append(scores.gather(-1, token))
        scores = scores.scatter(-1, token, -torch.inf)
    return torch.cat(firsts, -1), torch.cat(leads, -1)


def signed(value: int) -> int:
    """Return the 64 bits as a signed integer."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(value: Tensor, by: int) -> Tensor:
    """Return the value shifted right without its sign."""
    shifted: Tensor = (value >> by) & (2 ** (64 - by) - 1)
    return shifted
