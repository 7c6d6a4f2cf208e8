"""Between the wire's messages and the core's values. Everything that a peer sent is checked here, and only here."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.contract import Contract, Plan, StepReport
from outrider.core.tree import Delta, edge_code, edge_from_code
from outrider.errors import InvalidRequest
from outrider.v1 import drafter_pb2, types_pb2

MAX_DELTA_NODES = 1024  # nodes in one delta
SNAPSHOT_TOKENS = 4096  # tokens in one part of a snapshot


def contract_to_pb(contract: Contract) -> types_pb2.Contract:
    """The contract's message."""
    return types_pb2.Contract(
        seed=contract.seed,
        choice=contract.choice,
        temperature=contract.temperature,
        top_k=contract.top_k,
        top_p=contract.top_p,
        rule=contract.rule,
        max_tokens=contract.max_tokens,
        stop_ids=contract.stop_ids,
    )


def contract_from_pb(message: types_pb2.Contract) -> Contract:
    """The contract. Raises InvalidRequest naming the field that is absurd."""
    return Contract(
        seed=message.seed,
        choice=message.choice,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        rule=message.rule,
        max_tokens=message.max_tokens,
        stop_ids=tuple(message.stop_ids),
    )


def plan_to_pb(plan: Plan) -> types_pb2.Plan:
    """The plan's message."""
    return types_pb2.Plan(
        version=plan.version,
        depth=plan.depth,
        width=plan.width,
        nodes=plan.nodes,
        wait_us=plan.wait_us,
        overlap=plan.overlap,
    )


def plan_from_pb(message: types_pb2.Plan) -> Plan:
    """The plan. Raises InvalidRequest naming the field that is absurd."""
    return Plan(
        version=message.version,
        depth=message.depth,
        width=message.width,
        nodes=message.nodes,
        wait_us=message.wait_us,
        overlap=message.overlap,
    )


def report_to_pb(report: StepReport) -> types_pb2.StepReport:
    """The report's message."""
    return types_pb2.StepReport(
        verified=report.verified,
        accepted=report.accepted,
        verified_depth=report.verified_depth,
        waited_us=report.waited_us,
        forward_us=report.forward_us,
        wire_bytes=report.wire_bytes,
        plan_version=report.plan_version,
        drafters=report.drafters,
    )


def report_from_pb(message: types_pb2.StepReport) -> StepReport:
    """The report."""
    return StepReport(
        verified=message.verified,
        accepted=message.accepted,
        verified_depth=message.verified_depth,
        waited_us=message.waited_us,
        forward_us=message.forward_us,
        wire_bytes=message.wire_bytes,
        plan_version=message.plan_version,
        drafters=message.drafters,
    )


def delta_to_pb(
    delta: Delta, *, session_id: str, epoch: int, attachment: int, plan_version: int, exhausted: bool = False
) -> drafter_pb2.TreeDelta:
    """The delta's message: about four bytes a node. `exhausted`: nothing more comes before the next commit."""
    return drafter_pb2.TreeDelta(
        session_id=session_id,
        epoch=epoch,
        attachment=attachment,
        root_position=delta.root_position,
        root_digest=delta.root_digest,
        first_id=delta.first_id,
        parents=[identity - parent if parent else 0 for identity, parent in enumerate(delta.parents, delta.first_id)],
        tokens=delta.tokens,
        edges=bytes(edge_code(edge) for edge in delta.edges),
        plan_version=plan_version,
        exhausted=exhausted,
    )


def delta_from_pb(message: drafter_pb2.TreeDelta, vocabulary: int) -> Delta:
    """The delta. Raises InvalidRequest when it is malformed: sizes that differ, too many nodes, foreign tokens."""
    count = len(message.tokens)
    if count > MAX_DELTA_NODES:
        raise InvalidRequest("tokens", f"a delta has {count} nodes, must have at most {MAX_DELTA_NODES}")
    if len(message.parents) != count or len(message.edges) != count:
        raise InvalidRequest(
            "parents", f"{len(message.parents)} parents and {len(message.edges)} edges for {count} tokens"
        )
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
    )


def check_tokens(tokens: Sequence[int], vocabulary: int, field: str = "tokens") -> None:
    """Raises InvalidRequest unless every id is below `vocabulary`."""
    if tokens and max(tokens) >= vocabulary:
        raise InvalidRequest(field, f"token id {max(tokens)} is outside the vocabulary (0 to {vocabulary - 1})")
