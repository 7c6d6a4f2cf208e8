"""A generation's events and sessions as clients' messages."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.contract import Contract
from outrider.core.logprobs import unpack
from outrider.core.speculation import SpeculationStatus
from outrider.store.sessions import SessionRecord
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from router.answer import Part, Reason
from router.outbox import Event, Finished, Started

_REASONS = {
    Reason.STOP: types_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Reason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    Reason.DEADLINE: types_pb2.FINISH_REASON_DEADLINE,
    Reason.ABANDONED: types_pb2.FINISH_REASON_ABANDONED,
    Reason.FAILED: types_pb2.FINISH_REASON_FAILED,
}


def event_to_pb(event: Event, contract: Contract, spelled: Callable[[int], bytes]) -> pb.GenerateResponse:
    """What a client hears of an event; `spelled` gives a token's text."""
    match event:
        case Started():
            return pb.GenerateResponse(
                started=pb.Started(
                    session_id=event.session_id,
                    model=event.model,
                    seed=event.seed,
                    prompt_tokens=event.prompt_tokens,
                    generation=event.generation,
                    cached_tokens=event.cached_tokens,
                    forked_from=event.forked_from,
                    rule=contract.rule,
                    lossy=contract.lossy,
                )
            )
        case Part():
            return pb.GenerateResponse(chunk=_chunk_to_pb(event, contract, spelled))
        case Finished():
            return pb.GenerateResponse(finished=_finished_to_pb(event))


def _chunk_to_pb(part: Part, contract: Contract, spelled: Callable[[int], bytes]) -> pb.Chunk:
    entries = [] if contract.logprobs is None else unpack(part.logprobs, contract.logprobs)
    return pb.Chunk(
        text=part.text,
        token_ids=part.tokens,
        gaps=part.gaps,
        next_position=part.position + len(part.tokens),
        text_offset=part.text_offset,
        logprobs=[
            pb.TokenLogprobs(
                logprob=entry.logprob,
                top_ids=[token for token, _ in entry.top],
                top_logprobs=[logprob for _, logprob in entry.top],
                text=spelled(token),
                top_texts=[spelled(likely) for likely, _ in entry.top],
            )
            for token, entry in zip(part.tokens, entries, strict=False)
        ],
    )


def session_to_pb(record: SessionRecord) -> pb.Session:
    """What a client may know of a session."""
    return pb.Session(
        session_id=record.session_id,
        model=record.model,
        length=record.length,
        digest=record.digest,
        generation=record.generation,
        running=record.generation > 0 and not record.finished,
        reason=_REASONS[Reason(record.finished)] if record.finished else None,
        answer_position=record.turn.answer_position if record.turn else 0,
        epoch=record.epoch,
        verifier=record.verifier,
        drafters=record.drafters,
    )


def _finished_to_pb(event: Finished) -> pb.Finished:
    figures = event.figures
    return pb.Finished(
        reason=_REASONS[event.reason],
        usage=pb.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=figures.completion_tokens,
            steps=figures.steps,
            verified=figures.verified,
            accepted=figures.accepted,
            reached_by_depth=figures.reached_by_depth,
            tried_by_depth=figures.tried_by_depth,
            wire_bytes=figures.wire_bytes,
            first_token_us=figures.first_token_us,
            total_us=figures.elapsed_us(),
            decode_us=figures.last_token_us - figures.first_token_us,
            speculation=_speculation_to_pb(figures.speculation.summary(figures.accepted)),
        ),
    )


def _speculation_to_pb(status: SpeculationStatus) -> types_pb2.SpeculationStatus:
    return types_pb2.SpeculationStatus(
        reason=f"SPECULATION_REASON_{status.reason.name}",
        detail=status.detail,
        steps=status.steps,
        plain_rate=round(status.plain_rate * 1000),
        drafted_rate=round(status.drafted_rate * 1000),
    )
