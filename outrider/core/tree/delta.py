"""What a drafter and its upstream send one another about their two copies of a tree."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.acceptance.draft_distribution import SparseRow


@dataclass(frozen=True, slots=True)
class Delta:
    """New nodes under one root as a drafter sends them, parents before children."""

    root_position: int
    root_digest: int
    first_id: int  # id of the first node; the others follow in steps of one
    parents: tuple[int, ...]  # id of each node's parent; 0 is the root
    tokens: tuple[int, ...]
    edges: tuple[float, ...]  # logarithms, each a multiple of 1/16
    drawn: tuple[SparseRow, ...] = ()  # each parent's q, in the order of the parents' first children
    origin: str = ""  # the drafter that drafted all nodes, if it is not the sender
    rescored: tuple[tuple[int, float], ...] = ()  # ids sent earlier, with their new edge scores
    version: int = 0  # of `rescored`; a tree ignores scores whose version is not newer than the last
    span: bytes = b""  # the trace span in which the nodes were drafted, where the request is traced


@dataclass(frozen=True, slots=True)
class Hints:
    """The best nodes of an upstream's tree, which it sends to its drafters; parents before children."""

    root_position: int
    parents: tuple[int, ...]  # index of each node's parent among these nodes; -1 is the root
    tokens: tuple[int, ...]
    edges: tuple[float, ...]  # logarithms of the upstream's edge scores


class DigestMismatch(Exception):
    """Raised when the sender's copy of the committed tokens differs from this one. The sender needs a snapshot."""
