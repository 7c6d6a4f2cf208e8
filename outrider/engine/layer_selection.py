"""The selection of a checkpoint's layers: all, the first ones (early exit), or all but some (layer skip).

A model of some of the target's layers, with the target's final norm and head, drafts for it without training. This is
the drafting stage of self-speculative decoding (Draft & Verify, arXiv 2309.08168). The paper also skips halves of
layers and searches for the best set; this module leaves out whole layers, and the caller chooses them.
"""

from __future__ import annotations

from collections.abc import Collection

from outrider.errors import ConfigError


def kept_layers(count: int, layers: int | None = None, skip: Collection[int] = ()) -> tuple[int, ...]:
    """Return the indices of the layers to keep of a checkpoint's `count`: the first `layers`, or all but `skip`.

    Raises ConfigError, naming the setting, when no layer is left, when there is no such layer, or when both are given.
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
