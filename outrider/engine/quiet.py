"""What libraries print about themselves is kept from whoever runs a command."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TALKERS = ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the warnings of transformers, torchao and torch while they are imported or load a checkpoint.

    transformers imports torchao when it loads a first checkpoint, so that belongs into the body, too.
    """
    talkers = [logging.getLogger(name) for name in _TALKERS]
    levels = [talker.level for talker in talkers]
    for talker in talkers:
        talker.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for talker, level in zip(talkers, levels, strict=True):
            talker.setLevel(level)
