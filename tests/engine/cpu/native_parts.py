"""The arguments of a compiled model whose layers have Llama's parts."""

from __future__ import annotations

from typing import Any


def llama_parts(layers: int, dim: int) -> tuple[Any, Any, Any]:
    """Those behind its sizes: parts, experts and the gated delta rule."""
    none = [0] * layers
    parts = (dim**-0.5, 1.0, 1.0, 0.0, 0.0, dim, False, False, "silu", none, none)
    return parts, (0, 0, 0, False, 0), (0, 0, 0, 0, 0, False, False, none)
