"""Rotary position embedding (RoPE, arXiv 2104.09864): its frequencies and angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling for a longer context: slows low frequencies, keeps high ones, blends those between."""

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
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. Raises CheckpointError."""
        field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
        values = raw.get(field) or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {field} is {values!r:.80}, must be an object")

        def number(key: str, default: Any = None) -> float:
            value = values.get(key, default)
            if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
                raise CheckpointError(f"{path}: {field}.{key} is {value!r:.80}, must be a positive number")
            return float(value)

        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise CheckpointError(f"{path}: {field} has type {kind!r:.80}, must be 'default' or 'llama3'")
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

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Return the radians per position of each pair of dimensions: [head_dim / 2].

        Computed in float32, operation by operation, as transformers does: at position 1000 a frequency that is an ulp
        better moves the angle, and then the logits, by more than everything else together. The powers alone are
        computed in float64 and then rounded, because torch rounds them correctly, or almost.
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = np.power(np.float64(np.float32(self.theta)), exponents.astype(np.float64)).astype(np.float32)
        plain: NDArray[np.float32] = np.float32(1.0) / powers
        if self.scaling is None:
            return plain
        low, high = self.scaling.low_freq_factor, self.scaling.high_freq_factor
        length, factor = np.float32(self.scaling.original_context), np.float32(self.scaling.factor)
        wavelength = np.float32(2 * math.pi) / plain
        scaled = np.where(wavelength > np.float32(self.scaling.original_context / low), plain / factor, plain)
        blend = (length / wavelength - np.float32(low)) / np.float32(high - low)
        blended = (np.float32(1.0) - blend) * scaled / factor + blend * scaled
        between = (wavelength >= np.float32(self.scaling.original_context / high)) & (
            wavelength <= np.float32(self.scaling.original_context / low)
        )
        return np.where(between, blended, scaled)

    def table(self, positions: int, head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosine and sine of each pair's angle at each position: [positions, head_dim / 2] each."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies(head_dim)
        exact = angles.astype(np.float64)
        return np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
