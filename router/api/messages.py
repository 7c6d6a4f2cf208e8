"""Converts a generation's events and sessions to the clients' messages."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.sampling.logprobs import unpack
from outrider.core.session.contract import Contract, FinishReason
from outrider.store.adapters import NamedAdapter
from outrider.store.sessions import SessionRecord
from outrider.v1 import inference_pb2 as pb
from outrider.wire.inference import speculation_to_pb
from outrider.wire.types import reason_to_pb
from router.sessions.outbox import Event, FinishedEvent, StartedEvent
from router.sessions.response import ResponsePart


def adapter_to_pb(named: NamedAdapter) -> pb.ModelAdapter:
    """Return the message for an adapter that requests may name."""
    return pb.ModelAdapter(
        name=named.name,
        model=named.model,
        folder=named.adapter.folder,
        digest=bytes.fromhex(named.adapter.digest),
        rank=named.rank,
        parameters=named.parameters,
    )


def event_to_pb(event: Event, contract: Contract, token_text: Callable[[int], bytes]) -> pb.GenerateResponse:
    """Return the message for an event; `token_text` maps a token to its bytes."""
    match event:
        case StartedEvent():
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
                    **event.form._asdict(),
                )
            )
        case ResponsePart():
            return _chunk_to_pb(event, contract, token_text)
        case FinishedEvent():
            return pb.GenerateResponse(finished=_finished_to_pb(event))


def _chunk_to_pb(part: ResponsePart, contract: Contract, token_text: Callable[[int], bytes]) -> pb.GenerateResponse:
    message = pb.GenerateResponse()
    chunk = message.chunk  # filled in place, which takes half as long as copying one
    chunk.SetInParent()
    chunk.text = part.text
    chunk.next_position = part.position + len(part.tokens)
    chunk.text_offset = part.text_offset
    if part.ranks:
        _add_prompt(chunk, part, contract.prompt_logprobs or 0, token_text)
        return message
    chunk.token_ids.extend(part.tokens)
    chunk.gaps.extend(part.gaps)
    if contract.logprobs is not None:
        for token, entry in zip(part.tokens, unpack(part.logprobs, contract.logprobs), strict=False):
            chunk.logprobs.add(
                logprob=entry.logprob,
                top_ids=entry.top_ids,
                top_logprobs=entry.top_logprobs,
                text=token_text(token),
                top_texts=map(token_text, entry.top_ids),
            )
    return message


def _add_prompt(chunk: pb.Chunk, part: ResponsePart, alternatives: int, token_text: Callable[[int], bytes]) -> None:
    """Add a part of the prompt to a chunk. The first token has no log-probability, and no alternatives."""
    for token, rank, entry in zip(part.tokens, part.ranks, unpack(part.logprobs, alternatives), strict=True):
        top_ids = entry.top_ids if rank else ()
        chunk.prompt_logprobs.add(
            logprob=entry.logprob,
            top_ids=top_ids,
            top_logprobs=entry.top_logprobs if rank else (),
            text=token_text(token),
            top_texts=map(token_text, top_ids),
            id=token,
            rank=rank,
        )


def session_to_pb(record: SessionRecord) -> pb.Session:
    """Return what a client may know of a session."""
    return pb.Session(
        session_id=record.session_id,
        model=record.model,
        length=record.length,
        digest=record.digest,
        generation=record.generation,
        running=record.generation > 0 and not record.finished,
        reason=reason_to_pb(FinishReason(record.finished)) if record.finished else None,
        answer_position=record.turn.answer_position if record.turn else 0,
        epoch=record.epoch,
        verifier=record.verifier,
        drafters=record.drafters,
    )


def _finished_to_pb(event: FinishedEvent) -> pb.Finished:
    usage = event.usage
    return pb.Finished(
        reason=reason_to_pb(event.reason),
        stop=event.stop,
        usage=pb.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            steps=usage.steps,
            verified=usage.verified,
            accepted=usage.accepted,
            reached_by_depth=usage.reached_by_depth,
            tried_by_depth=usage.tried_by_depth,
            wire_bytes=usage.wire_bytes,
            first_token_us=usage.first_token_us,
            total_us=usage.elapsed_us(),
            decode_us=usage.last_token_us - usage.first_token_us,
            speculation=speculation_to_pb(usage.speculation.summary(usage.accepted)),
        ),
    )
