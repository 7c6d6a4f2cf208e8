"""Messages of inference.proto: what clients and routers send one another."""

from __future__ import annotations

import grpc.aio

from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus, printable
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc, types_pb2

# What others handle as it is.
AnswerRoute = pb.AnswerRoute
AnswersRequest = pb.AnswersRequest
AnswersResponse = pb.AnswersResponse
CancelRequest = pb.CancelRequest
CheckKeyRequest = pb.CheckKeyRequest
CheckKeyResponse = pb.CheckKeyResponse
Chunk = pb.Chunk
CloseSessionRequest = pb.CloseSessionRequest
CreateSessionRequest = pb.CreateSessionRequest
DetokenizeRequest = pb.DetokenizeRequest
DetokenizeResponse = pb.DetokenizeResponse
FindResponseRequest = pb.FindResponseRequest
Finished = pb.Finished
GenerateRequest = pb.GenerateRequest
GenerateResponse = pb.GenerateResponse
GetSessionRequest = pb.GetSessionRequest
InferenceStub = inference_pb2_grpc.InferenceStub
KeepResponseRequest = pb.KeepResponseRequest
ListModelsRequest = pb.ListModelsRequest
LoadAdapterRequest = pb.LoadAdapterRequest
ResumeRequest = pb.ResumeRequest
Started = pb.Started
TokenLogprobs = pb.TokenLogprobs
TokenizeRequest = pb.TokenizeRequest
TokenizeResponse = pb.TokenizeResponse
Tools = pb.Tools
UnloadAdapterRequest = pb.UnloadAdapterRequest
WatchSessionRequest = pb.WatchSessionRequest

_SPECULATION = "SPECULATION_REASON_"


def register(servicer: inference_pb2_grpc.InferenceServicer, server: grpc.aio.Server) -> str:
    """Add the service to a server. Return its full name."""
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    return pb.DESCRIPTOR.services_by_name["Inference"].full_name


def speculation_to_pb(status: SpeculationStatus) -> types_pb2.SpeculationStatus:
    """Return the status's message."""
    return types_pb2.SpeculationStatus(
        reason=f"{_SPECULATION}{status.reason.name}",
        detail=status.detail,
        steps=status.steps,
        plain_rate=round(status.plain_rate * 1000),
        drafted_rate=round(status.drafted_rate * 1000),
    )


def speculation_from_pb(message: types_pb2.SpeculationStatus) -> SpeculationStatus:
    """Return the status of a message; a reason that this version does not know becomes `UNKNOWN`."""
    try:
        name = types_pb2.SpeculationReason.Name(message.reason).removeprefix(_SPECULATION)
        reason = SpeculationReason[name]
    except (KeyError, ValueError):
        reason = SpeculationReason.UNKNOWN
    return SpeculationStatus(
        reason, printable(message.detail), message.steps, message.plain_rate / 1000, message.drafted_rate / 1000
    )
