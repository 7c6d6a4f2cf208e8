"""A generation's place in the grammar that its answer has to follow, as a sampler uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class GrammarState(Protocol):
    """The place behind the committed tokens. Tokens behind them may be asked about without being committed."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Return which ids may follow the committed tokens and `path`: [vocabulary]. None may follow a wrong path.

        Where the text may end, the ids that end it are among them.
        """

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Return whether one id may follow, which takes less time than the mask."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""

    def forced(self) -> list[int]:
        """Return the tokens of the text that has to follow, as the tokenizer divides it; often none."""
