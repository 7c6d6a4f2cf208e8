"""A pass that an engine begins by itself, as soon as the tokens of the one before are chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FollowingPass:
    """What may follow a pass of one row for each text: a row for each text that goes on, with the token just chosen."""

    wanted: Callable[[], bool]  # asked when the tokens are there, in the engine's thread
    stop_ids: Sequence[Collection[int] | None]  # of each segment, the tokens that end its text; None: it ends with any
