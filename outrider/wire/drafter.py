"""Messages of drafter.proto: how drafters are attached, and both directions of a Draft stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from outrider.core.acceptance.draft_distribution import LARGEST_WEIGHT, MAX_TOKENS, SparseRow
from outrider.core.session.contract import SentTerms
from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.session.snapshot import FeatureRows, MirrorSnapshot, MirrorUpdate
from outrider.core.tree.committed_window import ALIAS_SPAN, settled_prefix
from outrider.core.tree.delta import Delta
from outrider.core.tree.delta import Hints as TreeHints
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.errors import InvalidRequest
from outrider.telemetry.tracing import SPAN_BYTES
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc, types_pb2
from outrider.wire.types import MAX_DELTA_NODES, check_tokens, contract_from_pb, plan_from_pb

# What others handle as it is.
AttachRequest = pb.AttachRequest
AttachResponse = pb.AttachResponse
Closed = pb.Closed
Commit = pb.Commit
DESCRIPTOR = pb.DESCRIPTOR
DescribeRequest = types_pb2.DescribeRequest
DetachRequest = pb.DetachRequest
DetachResponse = pb.DetachResponse
DraftDown = pb.DraftDown
DraftTarget = pb.DraftTarget
DraftUp = pb.DraftUp
DrafterDescription = pb.DrafterDescription
DrafterStub = drafter_pb2_grpc.DrafterStub
GateAnswer = pb.GateAnswer
GateCall = pb.GateCall
GateDown = pb.GateDown
GateStatus = pb.GateStatus
GateUp = pb.GateUp
GateWelcome = pb.GateWelcome
GatedDrafter = pb.GatedDrafter
Heartbeat = types_pb2.Heartbeat
Hello = pb.Hello
Hints = pb.Hints
Snapshot = pb.Snapshot
Subscribe = pb.Subscribe
TargetList = pb.TargetList
TargetsRequest = pb.TargetsRequest
TreeDelta = pb.TreeDelta
Unsubscribe = pb.Unsubscribe
Welcome = pb.Welcome

DRAFT = "/outrider.v1.TreeSink/Draft"
CONNECT = "/outrider.v1.DrafterGate/Connect"
TARGETS = "/outrider.v1.DrafterGate/Targets"
UPSTREAM_KEY = "outrider-upstream"  # metadata of a stream that a router relays: the verifier's id

MAX_NAME = 64
SNAPSHOT_TOKENS = 4096
SNAPSHOT_FEATURES = 4096  # rows of features in a whole snapshot, for its last tokens
PART_BYTES = 2**20  # bytes of features in one part
FINITE = 0x7F80  # the exponent of a bfloat16, all ones for infinities and NaN
LARGEST_SNAPSHOT = 2**20  # tokens
LARGEST_VOCABULARY = 2**31 - 1  # ids of a target; indices and engines hold tokens in signed 32-bit integers


def register(servicer: drafter_pb2_grpc.DrafterServicer, server: grpc.aio.Server) -> str:
    """Add the service to a server. Return its full name."""
    drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server)
    return pb.DESCRIPTOR.services_by_name["Drafter"].full_name


def set_sent_terms(message: pb.Snapshot | pb.Commit, terms: SentTerms) -> None:
    """Set the terms of a snapshot or a commit."""
    message.min_path_score, message.time_cost_tokens_per_s, message.ahead = terms


def sent_terms_of(message: pb.Snapshot | pb.Commit) -> SentTerms:
    """Return the terms of a snapshot or a commit."""
    return SentTerms(message.min_path_score, message.time_cost_tokens_per_s, message.ahead)


def delta_to_pb(
    delta: Delta, *, attachment: int, epoch: int, plan_version: int, exhausted: bool = False
) -> pb.TreeDelta:
    """Return the delta's message, about four bytes per node. `exhausted`: the drafter sends nothing more before the
    next commit."""
    return pb.TreeDelta(
        attachment=attachment,
        epoch=epoch,
        root_position=delta.root_position,
        root_digest=delta.root_digest,
        first_id=delta.first_id,
        parents=[identity - parent if parent else 0 for identity, parent in enumerate(delta.parents, delta.first_id)],
        tokens=delta.tokens,
        edges=bytes(edge_code(edge) for edge in delta.edges),
        drawn=[pb.DrawnFrom(tokens=row.tokens, weights=row.weights) for row in delta.drawn],
        plan_version=plan_version,
        exhausted=exhausted,
        origin=delta.origin,
        rescored=[identity for identity, _ in delta.rescored],
        rescored_edges=bytes(edge_code(edge) for _, edge in delta.rescored),
        rescore_version=delta.version,
        span=delta.span,
    )


def delta_from_pb(message: pb.TreeDelta, vocabulary: int) -> Delta:
    """Return the delta. Raises InvalidRequest for a malformed message: sizes that differ, too many nodes, tokens
    outside the vocabulary."""
    count = len(message.tokens)
    if count > MAX_DELTA_NODES:
        raise InvalidRequest("tokens", f"a delta has {count} nodes, must have at most {MAX_DELTA_NODES}")
    if len(message.parents) != count or len(message.edges) != count:
        raise InvalidRequest(
            "parents", f"{len(message.parents)} parents and {len(message.edges)} edges for {count} tokens"
        )
    if len(message.drawn) > count:
        raise InvalidRequest("drawn", f"has {len(message.drawn)} rows for {count} nodes")
    if len(message.rescored) != len(message.rescored_edges) or len(message.rescored) > MAX_DELTA_NODES:
        raise InvalidRequest(
            "rescored", f"{len(message.rescored)} ids, {len(message.rescored_edges)} edges; at most {MAX_DELTA_NODES}"
        )
    if len(message.origin) > MAX_NAME:
        raise InvalidRequest("origin", f"has {len(message.origin)} characters, must have at most {MAX_NAME}")
    if len(message.span) not in (0, SPAN_BYTES):
        raise InvalidRequest("span", f"has {len(message.span)} bytes, must have none or {SPAN_BYTES}")
    if message.first_id < 1:
        raise InvalidRequest("first_id", "must be at least 1: id 0 is the root")
    tokens = tuple(message.tokens)
    check_tokens(tokens, vocabulary)
    parents = []
    for identity, distance in enumerate(message.parents, message.first_id):
        if distance >= identity:
            raise InvalidRequest("parents", f"node {identity} names a parent {distance} ids before it")
        parents.append(identity - distance if distance else 0)
    return Delta(
        root_position=message.root_position,
        root_digest=message.root_digest,
        first_id=message.first_id,
        parents=tuple(parents),
        tokens=tokens,
        edges=tuple(map(edge_from_code, message.edges)),
        drawn=tuple(_drawn_from_pb(row, vocabulary) for row in message.drawn),
        origin=message.origin,
        rescored=tuple(zip(message.rescored, map(edge_from_code, message.rescored_edges), strict=True)),
        version=message.rescore_version,
        span=message.span,
    )


def hints_to_pb(hints: TreeHints, *, attachment: int, epoch: int) -> pb.Hints:
    """Return the hints' message."""
    return pb.Hints(
        attachment=attachment,
        epoch=epoch,
        root_position=hints.root_position,
        parents=[index - parent if parent >= 0 else 0 for index, parent in enumerate(hints.parents)],
        tokens=hints.tokens,
        edges=bytes(edge_code(edge) for edge in hints.edges),
    )


def hints_from_pb(message: pb.Hints, vocabulary: int) -> TreeHints:
    """Return the hints. Raises InvalidRequest as `delta_from_pb` does."""
    count = len(message.tokens)
    if count > MAX_DELTA_NODES:
        raise InvalidRequest("tokens", f"{count} hints, must be at most {MAX_DELTA_NODES}")
    if len(message.parents) != count or len(message.edges) != count:
        raise InvalidRequest("parents", f"{len(message.parents)}, and {len(message.edges)} edges, for {count} tokens")
    check_tokens(message.tokens, vocabulary)
    if any(distance > index for index, distance in enumerate(message.parents)):
        raise InvalidRequest("parents", "one lies before the first hint")
    return TreeHints(
        message.root_position,
        tuple(index - distance if distance else -1 for index, distance in enumerate(message.parents)),
        tuple(message.tokens),
        tuple(map(edge_from_code, message.edges)),
    )


def features_from_pb(data: bytes, width: int) -> FeatureRows:
    """Return rows of features, each of `width` numbers; a `width` of 0: none were requested. Raises InvalidRequest for
    partial rows and for numbers that are not finite."""
    if data and not width:
        raise InvalidRequest("features", "were not asked for")
    if len(data) % (2 * max(1, width)):
        raise InvalidRequest("features", f"{len(data)} bytes are no rows of {width} numbers of two bytes")
    rows = np.frombuffer(data, "<u2").reshape(-1, max(1, width))
    if (rows & FINITE == FINITE).any():
        raise InvalidRequest("features", "must be finite")
    return rows


def tokens_in_part(width: int) -> int:
    """Return the number of tokens in one part of a snapshot with features of that width; 0: without features."""
    return min(SNAPSHOT_TOKENS, max(1, PART_BYTES // (2 * width))) if width else SNAPSHOT_TOKENS


def _drawn_from_pb(message: pb.DrawnFrom, vocabulary: int) -> SparseRow:
    tokens, weights = tuple(message.tokens), tuple(message.weights)
    check_tokens(tokens, vocabulary, "drawn")
    rising = all(one < other for one, other in itertools.pairwise(tokens))
    if not 1 <= len(tokens) <= MAX_TOKENS or len(weights) != len(tokens) or not rising:
        raise InvalidRequest("drawn", f"a row must have 1 to {MAX_TOKENS} tokens, ascending, and a weight for each")
    if not 1 <= min(weights) <= max(weights) <= LARGEST_WEIGHT:
        raise InvalidRequest("drawn", f"a weight must be 1 to {LARGEST_WEIGHT}")
    return SparseRow(tokens, weights)


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
