"""Drafts from other machines for vLLM: `RemoteDrafter` is its proposer. See docs/vllm.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider_vllm.remote_drafter import RemoteDrafter

__all__ = ["RemoteDrafter"]


def __getattr__(name: str) -> Any:
    """Import the proposer when vLLM asks for it: settings can be read without a vLLM."""
    if name != "RemoteDrafter":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from outrider_vllm.remote_drafter import RemoteDrafter

    return RemoteDrafter
