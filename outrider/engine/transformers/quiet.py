"""Keeps warnings of libraries about themselves out of the output of commands."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY_LOGGERS = ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of transformers, torchao and torch in the body, which imports them and loads a checkpoint.

    Loading belongs into the body because transformers imports torchao when it loads its first checkpoint.
    """
    with silenced(*_NOISY_LOGGERS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Let these loggers report nothing but errors in the body."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
