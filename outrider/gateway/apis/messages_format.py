"""The format of /v1/messages: blocks of thinking, text and calls, whole or as Anthropic's events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence

from outrider.client import AsyncClient, FinishReason, Generation
from outrider.core.answers.call_reader import CONTENT, REASONING
from outrider.gateway import serialize
from outrider.gateway.apis import anthropic_errors
from outrider.gateway.apis.answer_format import event
from outrider.gateway.apis.blocks import BlockChange, BlockEvent, BlockReader, StreamedBlock
from outrider.gateway.apis.messages import MessagesBody
from outrider.gateway.errors import Refusal
from outrider.gateway.multiplex import ReceivedPart
from outrider.gateway.schema import ResponseTerms
from outrider.gateway.serialize import Json

CALL_PREFIX = "toolu_"
SIGNATURE = "outrider"  # of thinking: clients send it back, and nobody checks it


class MessagesFormat:
    """The format of one answer."""

    keep_alive = event({"type": "ping"}, "ping")
    keeps_text = False

    def __init__(self, model: str, *, omits_thinking: bool) -> None:
        """`omits_thinking`: blocks of thinking have no text."""
        self._omits_thinking = omits_thinking
        self._message: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._begun = False
        self._blocks = BlockReader(CALL_PREFIX)

    async def body(self, generations: Sequence[Generation]) -> Json:
        (generation,) = generations
        content, reasoning, calls = generation.parts
        blocks: list[Json] = []
        if reasoning:
            blocks.append(_thinking("" if self._omits_thinking else reasoning, SIGNATURE))
        if content:
            blocks.append(_text(content))
        for call in calls:
            id_ = serialize.call_id(generation.form, call.id, CALL_PREFIX)
            blocks.append(_tool_use(id_, call.name, json.loads(call.arguments)))
        return {**self._message, "content": blocks, **_end(generation, called=bool(calls)), **_cost(generation)}

    def events(self, part: ReceivedPart) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            yield _event("message_start", message={**self._message, "usage": _first_usage(part)})
        for change in self._blocks.read(part):
            yield from self._block_events(change)
        if part.ended is not None:
            yield _event("message_delta", delta=_end(part.ended, called=self._blocks.called), **_cost(part.ended))
            yield _event("message_stop")

    async def last(self) -> Iterable[str]:
        return ()

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield event(anthropic_errors.body(refusal.status, refusal.body["error"]["message"], ""), "error")

    def _block_events(self, changed: BlockEvent) -> Iterator[str]:
        block = changed.block
        match changed.change:
            case BlockChange.BEGIN:
                yield _event("content_block_start", index=block.index, content_block=_begun(block))
            case BlockChange.TEXT if not (self._omits_thinking and block.call == REASONING):
                yield _event("content_block_delta", index=block.index, delta=_delta(block, changed.text))
            case BlockChange.END:
                if block.call == REASONING:
                    signed = {"type": "signature_delta", "signature": SIGNATURE}
                    yield _event("content_block_delta", index=block.index, delta=signed)
                yield _event("content_block_stop", index=block.index)


def messages_format(body: MessagesBody, terms: ResponseTerms, client: AsyncClient) -> MessagesFormat:
    """Return the format of a request of /v1/messages."""
    return MessagesFormat(terms.model, omits_thinking=body.thinking is not None and body.thinking.display == "omitted")


def _event(type_: str, **content: object) -> str:
    return event({"type": type_, **content}, type_)


def _thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _tool_use(id_: str, name: str, input_: Json) -> Json:
    return {"type": "tool_use", "id": id_, "name": name, "input": input_}


def _begun(block: StreamedBlock) -> Json:
    """Return a block without its text."""
    if block.call >= 0:
        return _tool_use(block.id, block.name, {})
    return _text("") if block.call == CONTENT else _thinking("", "")


def _delta(block: StreamedBlock, text: str) -> Json:
    if block.call >= 0:
        return {"type": "input_json_delta", "partial_json": text}
    if block.call == REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _end(generation: Generation, *, called: bool) -> Json:
    """Return why an answer ended, in Anthropic's words. Reasons that Anthropic does not know become max_tokens."""
    if generation.finish_reason is not FinishReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    why = "tool_use" if called else "stop_sequence" if generation.stop else "end_turn"
    return {"stop_reason": why, "stop_sequence": generation.stop or None}


def _first_usage(part: ReceivedPart) -> Json:
    """Return the usage as far as the first part of an answer shows it."""
    if part.ended is not None:
        return _tokens(part.ended.usage.prompt_tokens, part.ended.cached_tokens, part.ended.usage.completion_tokens)
    assert part.chunk is not None
    count = len(part.chunk.token_ids)
    return _tokens(part.chunk.next_position - count, part.cached_tokens, count)


def _cost(generation: Generation) -> Json:
    """Return the usage, and what speculation brought as chats have it."""
    usage = generation.usage
    tokens = _tokens(usage.prompt_tokens, generation.cached_tokens, usage.completion_tokens)
    why = serialize.cost([generation], 1)["outrider"]
    return {"usage": {**tokens, "outrider": why}, **serialize.speculation([generation])}


def _tokens(prompt: int, cached: int, completion: int) -> Json:
    """Return the numbers of tokens, as Anthropic has them: those of the prompt are without what was cached."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
