"""Drafts from other machines for vLLM: `RemoteDrafter` is its proposer. See docs/vllm.md."""

from outrider_vllm.remote_drafter import RemoteDrafter

__all__ = ["RemoteDrafter"]
