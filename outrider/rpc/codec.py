"""Conversion between wire messages and core values. Everything that a peer sent is checked here, and only here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from outrider.core.acceptance.draft_distribution import LARGEST_WEIGHT, MAX_TOKENS, SparseRow
from outrider.core.session.contract import Adapter, Contract, Grammar, Plan, SentTerms, StepReport
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.errors import InvalidRequest
from outrider.telemetry.tracing import SPAN_BYTES
from outrider.v1 import drafter_pb2, types_pb2

MAX_DELTA_NODES = 1024
MAX_NAME = 64
SNAPSHOT_TOKENS = 4096
SNAPSHOT_FEATURES = 4096  # rows of features in a whole snapshot, for its last tokens
PART_BYTES = 2**20  # bytes of features in one part
FINITE = 0x7F80  # the exponent of a bfloat16, all ones for infinities and NaN

FeatureRows = NDArray[np.uint16]  # [rows, width], the bits of bfloat16


def field_names(kind: type[Contract | Plan | StepReport]) -> tuple[str, ...]:
    """Return the fields of a value, which are also those of its message."""
    return tuple(field.name for field in fields(kind))


_CONTRACT, _PLAN, _REPORT = field_names(Contract), field_names(Plan), field_names(StepReport)
_figures = attrgetter(*_REPORT)  # of a report's message, in the order of the fields


def contract_to_pb(contract: Contract) -> types_pb2.Contract:
    """Return the contract's message."""
    values = {name: getattr(contract, name) for name in _CONTRACT}
    messages = {"grammar": grammar_to_pb(contract.grammar), "adapter": adapter_to_pb(contract.adapter)}
    return types_pb2.Contract(**values | {"logit_bias": dict(contract.logit_bias)} | messages)


def contract_from_pb(message: types_pb2.Contract) -> Contract:
    """Return the contract. Raises InvalidRequest naming the field that is out of range."""
    values = {name: getattr(message, name) for name in _CONTRACT}
    logprobs = message.logprobs if message.HasField("logprobs") else None
    grammar = grammar_from_pb(message.grammar) if message.HasField("grammar") else None
    adapter = adapter_from_pb(message.adapter) if message.HasField("adapter") else None
    return Contract(**values | {"logprobs": logprobs, "grammar": grammar, "adapter": adapter})


def grammar_to_pb(grammar: Grammar | None) -> types_pb2.Grammar | None:
    """Return a grammar's message."""
    if grammar is None:
        return None
    return types_pb2.Grammar(kind=grammar.kind, text=grammar.text, reasoning=grammar.reasoning)


def grammar_from_pb(message: types_pb2.Grammar) -> Grammar:
    """Return the grammar. Raises InvalidRequest."""
    return Grammar(message.kind, message.text, message.reasoning)


def adapter_to_pb(adapter: Adapter | None) -> types_pb2.Adapter | None:
    """Return an adapter's message."""
    return None if adapter is None else types_pb2.Adapter(folder=adapter.folder, digest=bytes.fromhex(adapter.digest))


def adapter_from_pb(message: types_pb2.Adapter) -> Adapter:
    """Return the adapter. Raises InvalidRequest."""
    return Adapter(message.folder, message.digest.hex())


def plan_to_pb(plan: Plan) -> types_pb2.Plan:
    """Return the plan's message."""
    return types_pb2.Plan(**{name: getattr(plan, name) for name in _PLAN})


def plan_from_pb(message: types_pb2.Plan) -> Plan:
    """Return the plan. Raises InvalidRequest naming the field that is out of range."""
    return Plan(**{name: getattr(message, name) for name in _PLAN})


def set_sent_terms(message: drafter_pb2.Snapshot | drafter_pb2.Commit, terms: SentTerms) -> None:
    """Set the terms of a snapshot or a commit."""
    message.price, message.time_price, message.ahead = terms


def sent_terms_of(message: drafter_pb2.Snapshot | drafter_pb2.Commit) -> SentTerms:
    """Return the terms of a snapshot or a commit."""
    return SentTerms(message.price, message.time_price, message.ahead)


def report_to_pb(report: StepReport) -> types_pb2.StepReport:
    """Return the report's message."""
    return types_pb2.StepReport(**{name: getattr(report, name) for name in _REPORT})


def report_from_pb(message: types_pb2.StepReport) -> StepReport:
    """Return the report. Raises InvalidRequest for a step that is deeper than a tree can be."""
    if max(message.accepted, message.verified_depth) > MAX_DELTA_NODES:
        raise InvalidRequest("report", f"accepts {message.accepted} nodes, at most {MAX_DELTA_NODES} can be")
    return StepReport(*_figures(message))


def delta_to_pb(
    delta: Delta, *, attachment: int, epoch: int, plan_version: int, exhausted: bool = False
) -> drafter_pb2.TreeDelta:
    """Return the delta's message, about four bytes per node. `exhausted`: the drafter sends nothing more before the
    next commit."""
    return drafter_pb2.TreeDelta(
        attachment=attachment,
        epoch=epoch,
        root_position=delta.root_position,
        root_digest=delta.root_digest,
        first_id=delta.first_id,
        parents=[identity - parent if parent else 0 for identity, parent in enumerate(delta.parents, delta.first_id)],
        tokens=delta.tokens,
        edges=bytes(edge_code(edge) for edge in delta.edges),
        drawn=[drafter_pb2.DrawnFrom(tokens=row.tokens, weights=row.weights) for row in delta.drawn],
        plan_version=plan_version,
        exhausted=exhausted,
        origin=delta.origin,
        rescored=[identity for identity, _ in delta.rescored],
        rescored_edges=bytes(edge_code(edge) for _, edge in delta.rescored),
        rescore_version=delta.version,
        span=delta.span,
    )


def delta_from_pb(message: drafter_pb2.TreeDelta, vocabulary: int) -> Delta:
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


def hints_to_pb(hints: Hints, *, attachment: int, epoch: int) -> drafter_pb2.Hints:
    """Return the hints' message."""
    return drafter_pb2.Hints(
        attachment=attachment,
        epoch=epoch,
        root_position=hints.root_position,
        parents=[index - parent if parent >= 0 else 0 for index, parent in enumerate(hints.parents)],
        tokens=hints.tokens,
        edges=bytes(edge_code(edge) for edge in hints.edges),
    )


def hints_from_pb(message: drafter_pb2.Hints, vocabulary: int) -> Hints:
    """Return the hints. Raises InvalidRequest as `delta_from_pb` does."""
    count = len(message.tokens)
    if count > MAX_DELTA_NODES:
        raise InvalidRequest("tokens", f"{count} hints, must be at most {MAX_DELTA_NODES}")
    if len(message.parents) != count or len(message.edges) != count:
        raise InvalidRequest("parents", f"{len(message.parents)}, and {len(message.edges)} edges, for {count} tokens")
    check_tokens(message.tokens, vocabulary)
    if any(distance > index for index, distance in enumerate(message.parents)):
        raise InvalidRequest("parents", "one lies before the first hint")
    return Hints(
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


def _drawn_from_pb(message: drafter_pb2.DrawnFrom, vocabulary: int) -> SparseRow:
    tokens, weights = tuple(message.tokens), tuple(message.weights)
    check_tokens(tokens, vocabulary, "drawn")
    rising = all(one < other for one, other in itertools.pairwise(tokens))
    if not 1 <= len(tokens) <= MAX_TOKENS or len(weights) != len(tokens) or not rising:
        raise InvalidRequest("drawn", f"a row must have 1 to {MAX_TOKENS} tokens, ascending, and a weight for each")
    if not 1 <= min(weights) <= max(weights) <= LARGEST_WEIGHT:
        raise InvalidRequest("drawn", f"a weight must be 1 to {LARGEST_WEIGHT}")
    return SparseRow(tokens, weights)


def check_tokens(tokens: Sequence[int], vocabulary: int, field: str = "tokens") -> None:
    """Raises InvalidRequest unless every id is below `vocabulary`."""
    if tokens and max(tokens) >= vocabulary:
        raise InvalidRequest(field, f"token id {max(tokens)} is outside the vocabulary (0 to {vocabulary - 1})")
