"""A pass that an engine begins by itself, as soon as the tokens of the one before are chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FollowingPass:
    """The next decode step, started before the host has seen this one's tokens: one row for each unfinished text."""

    wanted: Callable[[], bool]  # asked when the tokens are there, in the engine's thread
    stop_ids: Sequence[Collection[int] | None]  # of each segment, the tokens that end its text; None: it ends with any
