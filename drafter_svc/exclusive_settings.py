"""Checks a drafter's settings that exclude one another although each is valid by itself."""

from __future__ import annotations

from outrider.config import DrafterConfig
from outrider.errors import ConfigError


def check_settings(config: DrafterConfig) -> None:
    """Raises ConfigError for settings that exclude one another."""
    whole = config.drafts == "model" and config.target is None and config.layers is None and not config.skip
    alone = whole and config.tensor_parallel == 1
    if config.learns and not (alone and config.heads is None):
        raise ConfigError(
            "learns: is for a drafter with a whole model of the target's tokenizer in one rank; give it none of "
            "drafts, target, heads, layers, skip and tensor_parallel"
        )
    if config.heads is None:
        return
    if not alone or config.any_target or config.upstream_tier is not None:
        raise ConfigError(
            "heads: draft for verifiers of their own target, in one rank; give none of drafts, target, any_target, "
            "layers, skip, tier and tensor_parallel"
        )
    if config.device != "cpu" or config.backend == "transformers" or config.dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            "heads: run on the native backend on a CPU, in float32 or bfloat16; leave out backend, device and dtype"
        )
