"""A generation's place in the grammar that its answer has to follow, as a sampler uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError


class GrammarDelayed(Exception):
    """What a grammar allows is not known in time, or never will be: the state's `failure` says why."""


class GrammarState(Protocol):
    """The place behind the committed tokens. Tokens behind them may be asked about without being committed.

    What is asked about is computed in another process. The methods that return it wait for a bounded time, and raise
    GrammarDelayed after it.
    """

    failure: OutriderError | None  # why the grammar can be followed no longer
    on_change: Callable[[], None]  # called when `pending`, `slow` or `failure` may have changed

    @property
    def pending(self) -> bool:
        """Whether the next step would have to wait: for what is forced, and if `slow`, for what may follow."""

    @property
    def slow(self) -> bool:
        """Whether the grammar takes so long that only committed tokens should be asked about."""

    def mark_slow(self) -> None:
        """Take the grammar for slow for a while, because it was waited for in vain."""

    def prefetch(self, paths: Sequence[Sequence[int]]) -> None:
        """Have computed what may follow paths behind the committed tokens, without waiting for it."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Return which ids may follow the committed tokens and `path`: [vocabulary]. None may follow a wrong path.

        Where the text may end, the ids that end it are among them.
        """

    def first_allowed(self, path: Sequence[int], tokens: Sequence[int], count: int) -> Sequence[int]:
        """Return the indexes of the first `count` tokens that may follow `path`; it takes less time than `allowed`."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, without waiting."""

    def forced(self) -> list[int]:
        """Return the tokens of the text that has to follow, as the tokenizer divides it; often none."""

    def close(self) -> None:
        """Give up what is kept for this place."""
