"""Which layers of a checkpoint a model is made of: all, the first ones (early exit), or all but some (layer skip).

A model of fewer of the target's own layers, with its own final norm and head, drafts for it without training: the
drafting stage of self-speculative decoding (Draft & Verify, arXiv 2309.08168), which also skips halves of layers and
searches for the best set. Here whole layers are left out, and which is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Collection

from outrider.errors import ConfigError


def kept_layers(count: int, layers: int | None = None, skip: Collection[int] = ()) -> tuple[int, ...]:
    """Indices of a checkpoint's `count` layers that are kept: the first `layers`, or all that are not in `skip`.

    Raises ConfigError, naming the setting, when that is none, when there is no such layer, or when both are given.
    """
    if layers is not None and skip:
        raise ConfigError("skip: cannot be given together with layers; list the last layers in skip, too")
    if layers is not None:
        if not 1 <= layers <= count:
            raise ConfigError(f"layers: is {layers}, must be from 1 to {count}, which is what the checkpoint has")
        return tuple(range(layers))
    unknown = sorted(index for index in skip if not 0 <= index < count)
    if unknown:
        raise ConfigError(f"skip: the checkpoint has no layer {unknown[0]}; its layers are 0 to {count - 1}")
    kept = tuple(index for index in range(count) if index not in skip)
    if not kept:
        raise ConfigError(f"skip: lists all {count} layers of the checkpoint; leave one at least")
    return kept
