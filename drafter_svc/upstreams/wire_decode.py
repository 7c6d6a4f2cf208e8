"""Decodes and checks an upstream's frames: snapshots in parts, and commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drafter_svc.sessions.mirror import MirrorSnapshot, MirrorUpdate
from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.tree.committed_window import ALIAS_SPAN, settled_prefix
from outrider.errors import InvalidRequest
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.codec import (
    SNAPSHOT_FEATURES,
    SNAPSHOT_TOKENS,
    FeatureRows,
    check_tokens,
    contract_from_pb,
    features_from_pb,
    plan_from_pb,
    sent_terms_of,
)

LARGEST_SNAPSHOT = 2**20  # tokens
LARGEST_VOCABULARY = 2**31 - 1  # ids of a target; indices and engines hold tokens in signed 32-bit integers


@dataclass(frozen=True, slots=True)
class WantedFeatures:
    """The features that a drafter requests from its upstreams."""

    digest: bytes = b""  # of the fusion; empty: it requests none
    width: int = 0

    def rows(self, data: bytes, minimum: int, limit: int) -> FeatureRows:
        """Return the decoded rows. Raises InvalidRequest unless there are `minimum` to `limit` well-formed rows."""
        rows = features_from_pb(data, self.width)
        if self.width and not minimum <= len(rows) <= limit:
            raise InvalidRequest("features", f"are {len(rows)} rows, must be {minimum} to {limit}")
        return rows


NO_FEATURES = WantedFeatures()


@dataclass(slots=True)
class PartialSnapshot:
    """A snapshot whose parts are still being received."""

    tokens: list[int] = field(default_factory=list)
    features: list[FeatureRows] = field(default_factory=list)  # of the last tokens, by part
    known: Prefix = NOTHING  # digest of a prefix of the tokens, computed part by part
    vocabulary: int = 0  # of the target, from the latest part; 0: no part was received

    def clear(self) -> None:
        """Drop the parts that were received."""
        self.tokens.clear()
        self.features.clear()
        self.known = NOTHING

    def add_part(self, part: pb.Snapshot, vocabulary: int, wanted: WantedFeatures) -> MirrorSnapshot | None:
        """Add a part. Return the snapshot with the last part, else None. `vocabulary`: the target's, where the
        upstream does not name it. Raises InvalidRequest for a part that does not fit or is malformed.
        """
        if part.vocabulary > LARGEST_VOCABULARY:
            raise InvalidRequest("vocabulary", f"is {part.vocabulary}, must be at most {LARGEST_VOCABULARY}")
        self.vocabulary = part.vocabulary or vocabulary
        _check_count(part.tokens, SNAPSHOT_TOKENS)
        check_tokens(part.tokens, self.vocabulary)
        if part.position == 0:
            self.clear()
        if part.position != len(self.tokens) or part.position > LARGEST_SNAPSHOT:
            raise InvalidRequest("position", f"is {part.position}, must be {len(self.tokens)}, where the parts end")
        self._add_features(part, wanted)
        self.tokens.extend(part.tokens)
        self.known = settled_prefix(self.tokens, self.known)
        if not part.last:
            return None
        if not self.tokens:
            raise InvalidRequest("tokens", "a snapshot needs at least one token")
        if part.answer_position > len(self.tokens):
            raise InvalidRequest("answer_position", "lies beyond the snapshot's tokens")
        contract = contract_from_pb(part.contract)
        unpadded_vocabulary = min(part.unpadded_vocabulary or self.vocabulary, self.vocabulary)
        contract.check_vocabulary(self.vocabulary, unpadded_vocabulary)
        snapshot = MirrorSnapshot(
            tuple(self.tokens),
            part.digest,
            contract,
            plan_from_pb(part.plan),
            part.credit,
            sent_terms_of(part),
            part.answer_position,
            part.epoch,
            np.concatenate(self.features) if self.features else None,
            self.known,
            self.vocabulary,
            unpadded_vocabulary,
        )
        self.clear()
        return snapshot

    def _add_features(self, part: pb.Snapshot, wanted: WantedFeatures) -> None:
        """Add a part's features. Once they have begun, all tokens have them; the session's first token has none."""
        limit = len(part.tokens) - (part.position == 0)
        minimum = limit if self.features else int(part.last)
        rows = wanted.rows(part.features, minimum, limit)
        if len(rows):
            self.features.append(rows)
        if sum(map(len, self.features)) > SNAPSHOT_FEATURES:
            raise InvalidRequest("features", f"are more than {SNAPSHOT_FEATURES} rows")


def update_from_pb(commit: pb.Commit, vocabulary: int, wanted: WantedFeatures) -> MirrorUpdate:
    """Decode a commit. `vocabulary`: the target's. Raises InvalidRequest for a malformed commit."""
    _check_count(commit.tokens, ALIAS_SPAN)
    check_tokens(commit.tokens, vocabulary)
    features = wanted.rows(commit.features, len(commit.tokens), len(commit.tokens))
    return MirrorUpdate(
        commit.position,
        tuple(commit.tokens),
        commit.digest,
        plan_from_pb(commit.plan) if commit.HasField("plan") else None,
        sent_terms_of(commit),
        commit.credit,
        tuple(commit.dropped),
        features if len(features) else None,
    )


def _check_count(tokens: Sequence[int], limit: int) -> None:
    """Raise InvalidRequest for more tokens than a frame may have: processing them holds up all sessions."""
    if len(tokens) > limit:
        raise InvalidRequest("tokens", f"are {len(tokens)}, must be at most {limit} in a frame")
