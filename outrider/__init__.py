"""Outrider: distributed speculative decoding that never changes a token.

The names below are the SDK; they load when first used, so that the servers, which are built from the same
package, do not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider import errors
    from outrider.client import *

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "ConnectionOptions",
    "FinishReason",
    "Generation",
    "LogprobRows",
    "Model",
    "ModelAdapter",
    "Options",
    "Session",
    "SpeculationReason",
    "SpeculationStatus",
    "StepNode",
    "StepTree",
    "Stream",
    "TokenLogprobs",
    "TokenizedPrompt",
    "ToolCall",
    "Usage",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("outrider.errors")
    if name in __all__:
        return getattr(import_module("outrider.client"), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
