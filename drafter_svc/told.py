"""What an upstream's frames tell of a session, checked: all that is committed, and what came after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drafter_svc.replica import Snapshot, Update
from outrider.core.digest import NOTHING, Prefix
from outrider.core.tree import ALIAS_SPAN, settled
from outrider.errors import InvalidRequest
from outrider.rpc.codec import (
    SNAPSHOT_FEATURES,
    SNAPSHOT_TOKENS,
    FeatureRows,
    check_tokens,
    contract_from_pb,
    features_from_pb,
    plan_from_pb,
)
from outrider.v1 import drafter_pb2 as pb

LARGEST_SNAPSHOT = 2**20  # tokens
LARGEST_VOCABULARY = 2**31 - 1  # ids of a target; indices and engines hold tokens in 32 bits with a sign


@dataclass(frozen=True, slots=True)
class Wanted:
    """The features that a drafter asks its upstreams for."""

    digest: bytes = b""  # of how they are fused; empty: it asks for none
    width: int = 0

    def rows(self, data: bytes, least: int, most: int) -> FeatureRows:
        """Raises InvalidRequest unless they are so many, and all is well with them."""
        rows = features_from_pb(data, self.width)
        if self.width and not least <= len(rows) <= most:
            raise InvalidRequest("features", f"are {len(rows)} rows, must be {least} to {most}")
        return rows


NO_FEATURES = Wanted()


@dataclass(slots=True)
class Parts:
    """A snapshot that is still coming."""

    tokens: list[int] = field(default_factory=list)
    features: list[FeatureRows] = field(default_factory=list)  # with which the last tokens came
    known: Prefix = NOTHING  # of the tokens: their digest is computed part by part
    vocabulary: int = 0  # of the target, as the latest part has it; 0: none has come

    def clear(self) -> None:
        """Forgets what has come."""
        self.tokens.clear()
        self.features.clear()
        self.known = NOTHING

    def take(self, part: pb.Snapshot, vocabulary: int, wanted: Wanted) -> Snapshot | None:
        """The snapshot, once its last part has come. `vocabulary`: what the target's is taken to be where the upstream
        does not name it. Raises InvalidRequest for a part that does not fit or is malformed."""
        if part.vocabulary > LARGEST_VOCABULARY:
            raise InvalidRequest("vocabulary", f"is {part.vocabulary}, must be at most {LARGEST_VOCABULARY}")
        self.vocabulary = part.vocabulary or vocabulary
        _check_count(part.tokens, SNAPSHOT_TOKENS)
        check_tokens(part.tokens, self.vocabulary)
        if part.position == 0:
            self.clear()
        if part.position != len(self.tokens) or part.position > LARGEST_SNAPSHOT:
            raise InvalidRequest("position", f"is {part.position}, must be {len(self.tokens)}, where the parts end")
        self._take_features(part, wanted)
        self.tokens.extend(part.tokens)
        self.known = settled(self.tokens, self.known)
        if not part.last:
            return None
        if not self.tokens:
            raise InvalidRequest("tokens", "a snapshot needs at least one token")
        if part.answer_position > len(self.tokens):
            raise InvalidRequest("answer_position", "lies beyond the snapshot's tokens")
        contract, sayable = contract_from_pb(part.contract), min(part.sayable or self.vocabulary, self.vocabulary)
        contract.check_vocabulary(self.vocabulary, sayable)
        snapshot = Snapshot(
            tuple(self.tokens),
            part.digest,
            contract,
            plan_from_pb(part.plan),
            part.credit,
            part.price,
            part.time_price,
            part.ahead,
            part.answer_position,
            part.epoch,
            np.concatenate(self.features) if self.features else None,
            self.known,
            self.vocabulary,
            sayable,
        )
        self.clear()
        return snapshot

    def _take_features(self, part: pb.Snapshot, wanted: Wanted) -> None:
        """Once they have begun, all tokens have them; the session's first has none."""
        most = len(part.tokens) - (part.position == 0)
        least = most if self.features else int(part.last)
        rows = wanted.rows(part.features, least, most)
        if len(rows):
            self.features.append(rows)
        if sum(map(len, self.features)) > SNAPSHOT_FEATURES:
            raise InvalidRequest("features", f"are more than {SNAPSHOT_FEATURES} rows")


def update_from_pb(commit: pb.Commit, vocabulary: int, wanted: Wanted) -> Update:
    """What a commit says. `vocabulary`: the target's. Raises InvalidRequest for a malformed one."""
    _check_count(commit.tokens, ALIAS_SPAN)
    check_tokens(commit.tokens, vocabulary)
    features = wanted.rows(commit.features, len(commit.tokens), len(commit.tokens))
    return Update(
        commit.position,
        tuple(commit.tokens),
        commit.digest,
        plan_from_pb(commit.plan) if commit.HasField("plan") else None,
        commit.price,
        commit.time_price,
        commit.ahead,
        commit.credit,
        tuple(commit.dropped),
        features if len(features) else None,
    )


def _check_count(tokens: Sequence[int], most: int) -> None:
    """Raises InvalidRequest for more than a frame may have: what is done with them holds up all sessions."""
    if len(tokens) > most:
        raise InvalidRequest("tokens", f"are {len(tokens)}, must be at most {most} in a frame")
