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
class LinearScaling:
    """Slows all frequencies alike (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753), as it is for texts of up to the original context."""

    divisors: tuple[float, ...]  # of each frequency
    magnitude: float  # of what is turned
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """The frequencies of a model's RoPE."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | LongScaling | None

    @classmethod
    def from_config(cls, raw: dict[str, Any], path: Path, theta: float = 10000.0) -> Rope:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`. Raises CheckpointError.

        `theta`: where they have none. Of parameters by kind of layer, those of full attention count.
        """
        field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
        values = raw.get(field) or {}
        if isinstance(values, dict):
            values = values.get("full_attention", values)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {field} is {values!r:.80}, must be an object")

        def number(key: str, default: Any = None) -> float:
            value = values.get(key, default)
            if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
                raise CheckpointError(f"{path}: {field}.{key} is {value!r:.80}, must be a positive number")
            return float(value)

        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ("default", "llama3", "linear", "longrope"):
            raise CheckpointError(
                f"{path}: {field} has type {kind!r:.80}, must be 'default', 'llama3', 'linear' or 'longrope'"
            )
        theta = number("rope_theta", raw.get("rope_theta", theta))
        if kind == "default":
            return cls(theta, None)
        if kind == "linear":
            return cls(theta, LinearScaling(number("factor")))
        if kind == "longrope":
            return cls(theta, _long_scaling(values, raw, f"{path}: {field}"))
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
        if isinstance(self.scaling, LinearScaling):
            return plain / np.float32(self.scaling.factor)
        if isinstance(self.scaling, LongScaling):
            return np.float32(1.0) / (np.array(self.scaling.divisors, np.float32) * powers)
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
        magnitude = np.float32(self.scaling.magnitude if isinstance(self.scaling, LongScaling) else 1.0)
        return np.cos(exact).astype(np.float32) * magnitude, np.sin(exact).astype(np.float32) * magnitude


def _long_scaling(values: dict[str, Any], raw: dict[str, Any], where: str) -> LongScaling:
    """Read LongRoPE's parameters. Raises CheckpointError."""
    context = values.get("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
    longest, divisors = raw.get("max_position_embeddings"), values.get("short_factor")
    if not isinstance(context, int) or not isinstance(longest, int) or not 1 < context <= longest:
        raise CheckpointError(f"{where}: must have original_max_position_embeddings, at most max_position_embeddings")
    if not isinstance(divisors, list) or not all(isinstance(it, float | int) and 0 < it < math.inf for it in divisors):
        raise CheckpointError(f"{where}.short_factor must be a list of positive numbers")
    factor = values.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(longest / context) / math.log(context))
    return LongScaling(tuple(map(float, divisors)), float(factor), context)
