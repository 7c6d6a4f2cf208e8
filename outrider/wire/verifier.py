"""Messages of verifier.proto: both directions of a Decode stream, and what routers ask beside it."""

from __future__ import annotations

from collections.abc import Iterable

import grpc.aio

from outrider.core.control.drafters.contributions import DrafterContribution as Share
from outrider.core.session import decoding
from outrider.errors import InvalidRequest
from outrider.v1 import types_pb2, verifier_pb2_grpc
from outrider.v1 import verifier_pb2 as pb
from outrider.wire.types import contract_to_pb, plan_to_pb, report_from_pb

# What others handle as it is.
Control = pb.Control
DecodeCommit = pb.DecodeCommit
DecodeEnded = pb.DecodeEnded
DecodeRequest = pb.DecodeRequest
DecodeResponse = pb.DecodeResponse
DecodeStart = pb.DecodeStart
DecodeStarted = pb.DecodeStarted
DescribeRequest = types_pb2.DescribeRequest
DrafterContribution = pb.DrafterContribution
Error = types_pb2.Error
Plan = types_pb2.Plan
PlanChange = pb.PlanChange
PromptScores = pb.PromptScores
ReadAdapterRequest = pb.ReadAdapterRequest
ReadAdapterResponse = pb.ReadAdapterResponse
StepTree = types_pb2.StepTree
VerifierStub = verifier_pb2_grpc.VerifierStub
WarmRequest = pb.WarmRequest
WatchRequest = pb.WatchRequest


def register(servicer: verifier_pb2_grpc.VerifierServicer, server: grpc.aio.Server) -> str:
    """Add the service to a server. Return its full name."""
    verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server)
    return pb.DESCRIPTOR.services_by_name["Verifier"].full_name


def start_to_pb(start: decoding.DecodeStart, trace: Iterable[tuple[str, str]]) -> pb.DecodeStart:
    """Return the start's message. `trace`: headers of the caller's trace."""
    return pb.DecodeStart(
        session_id=start.session_id,
        tenant=start.tenant,
        epoch=start.epoch,
        model=start.model,
        tokenizer_digest=start.tokenizer_digest,
        tokens=start.tokens,
        digest=start.digest,
        answer_position=start.answer_position,
        contract=contract_to_pb(start.contract),
        plan=plan_to_pb(start.plan),
        window=start.window,
        lease_ms=round(start.lease_s * 1000),
        trace=dict(trace),
        scored=start.scored,
    )


def commit_from_pb(message: pb.DecodeCommit) -> decoding.ReceivedCommit:
    """Return the commit. Raises InvalidRequest for a malformed message."""
    if len(message.gaps) != len(message.tokens):
        raise InvalidRequest("gaps", f"are {len(message.gaps)} for {len(message.tokens)} tokens")
    return decoding.ReceivedCommit(
        epoch=message.epoch,
        position=message.position,
        tokens=tuple(message.tokens),
        gaps=tuple(message.gaps),
        logprobs=message.logprobs,
        digest=message.digest,
        report=report_from_pb(message.report),
        contributions=tuple(Share(it.drafter_id, it.verified, it.accepted, it.alone) for it in message.contributions),
    )


def scores_from_pb(message: pb.PromptScores) -> decoding.PromptScores:
    """Return the log-probabilities of a part of a prompt."""
    return decoding.PromptScores(message.position, message.logprobs, tuple(message.ranks))
