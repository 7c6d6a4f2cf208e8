"""Rotary position embedding (RoPE, arXiv 2104.09864) as one complex multiplication."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's way to a longer context: low frequencies are slowed, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: float


@dataclass(frozen=True, slots=True)
class Rope:
    """The frequencies of a model's RoPE."""

    theta: float
    scaling: Llama3Scaling | None

    @classmethod
    def from_config(cls, raw: dict[str, Any], head_dim: int, path: Path) -> Rope:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. Raises CheckpointError."""
        field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
        values = raw.get(field) or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {field} is {values!r}, must be an object")

        def number(key: str, default: Any = None) -> float:
            value = values.get(key, default)
            if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
                raise CheckpointError(f"{path}: {field}.{key} is {value!r}, must be a positive number")
            return float(value)

        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise CheckpointError(f"{path}: {field} has type {kind!r}, must be 'default' or 'llama3'")
        if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise CheckpointError(f"{path}: partial_rotary_factor must be 1")
        theta = number("rope_theta", raw.get("rope_theta", 10000.0))
        if kind == "default":
            return cls(theta, None)
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_context=number("original_max_position_embeddings", raw.get("max_position_embeddings")),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise CheckpointError(f"{path}: {field}.low_freq_factor must be below high_freq_factor")
        return cls(theta, scaling)

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: [head_dim / 2] float32.

        Computed in float32, operation by operation, as transformers does: at position 1000 a frequency that is
        an ulp better moves the angle, and then the logits, by more than everything else together.
        """
        plain = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        if self.scaling is None:
            return plain
        low, high = self.scaling.low_freq_factor, self.scaling.high_freq_factor
        length = self.scaling.original_context
        wavelength = 2 * math.pi / plain
        scaled = torch.where(wavelength > length / low, plain / self.scaling.factor, plain)
        blend = (length / wavelength - low) / (high - low)
        blended = (1 - blend) * scaled / self.scaling.factor + blend * scaled
        between = ~(wavelength < length / high) & ~(wavelength > length / low)
        return torch.where(between, blended, scaled)

    def table(self, positions: int, head_dim: int) -> Tensor:
        """The turn of each pair at each position: [positions, head_dim / 2] complex64."""
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * self.frequencies(head_dim)
        return torch.complex(angles.cos(), angles.sin())


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key projection, reordered so that the two halves of a RoPE pair are neighbours.

    Checkpoints pair dimension j with j + head_dim / 2; neighbours are one complex number in memory.
    """
    heads = weight.shape[0] // head_dim
    paired = weight.reshape(heads, 2, head_dim // 2, *weight.shape[1:]).transpose(1, 2)
    return paired.reshape(weight.shape)
