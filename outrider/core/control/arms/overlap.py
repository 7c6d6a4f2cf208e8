"""How drafters work beside a verifier's steps. See docs/control.md, "Ways of working"."""

from __future__ import annotations

from enum import Enum


class OverlapMode(Enum):
    """How drafters work beside a verifier's steps."""

    TURNS = "turns"  # a step may be held back for drafters, and drafters do not draft while it runs
    AHEAD = "ahead"  # drafters draft while steps run
    REST = "rest"  # drafters do not draft
