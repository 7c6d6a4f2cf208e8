"""The format of /v1/responses: items of reasoning, text and calls, whole or as OpenAI's events."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from outrider.client import AsyncClient, FinishReason, Generation
from outrider.core.answers.call_reader import CONTENT, REASONING
from outrider.errors import InvalidRequest, NotFound, OutriderError
from outrider.gateway import serialize
from outrider.gateway.apis.answer_format import KEEP_ALIVE
from outrider.gateway.apis.blocks import BlockChange, BlockEvent, BlockReader, StreamedBlock
from outrider.gateway.apis.responses import ENCRYPTED, ResponsesBody, write_reasoning
from outrider.gateway.bodies import parse_body
from outrider.gateway.errors import Refusal
from outrider.gateway.multiplex import ReceivedPart
from outrider.gateway.schema import ResponseTerms
from outrider.gateway.serialize import Json

CALL_PREFIX = "call_"
PREFIXES = {REASONING: "rs_", CONTENT: "msg_"}  # of items' ids; those of calls have fc_
DELTAS = {REASONING: "response.reasoning_text", CONTENT: "response.output_text"}
MOST_KEPT = 2**20 - 2  # characters of a conversation that routers keep
KEEP_S = 5.0  # longest time to keep a conversation, or to find it

Keep = Callable[[str, bytes], Awaitable[None]]  # keeps a conversation under an id; raises OutriderError

log = logging.getLogger(__name__)

CALL_DELTAS = "response.function_call_arguments"


class ResponsesFormat:
    """The format of one response."""

    keep_alive = KEEP_ALIVE
    keeps_text = True

    def __init__(self, echo: Json, keep: Keep, transcript: str, *, encrypts: bool) -> None:
        """`echo`: what the response repeats of its request; `keep` keeps the response's conversation under its id, of
        which `transcript` has the beginning, unless that is empty; `encrypts`: reasoning has `encrypted_content`."""
        self._response_id, created = f"resp_{secrets.token_hex(24)}", int(time.time())
        # As JSON, because a request's tools take many times the memory as objects.
        self._echo = json.dumps({"id": self._response_id, "object": "response", "created_at": created, **echo})
        self._encrypts = encrypts
        self._keep, self._transcript = keep, transcript
        self._ended: Generation | None = None
        self._blocks = BlockReader(CALL_PREFIX)
        self._events = 0
        self._items: list[Json] = []  # those that have ended
        self._id = ""  # of the item that is streamed

    async def body(self, generations: Sequence[Generation]) -> Json:
        (generation,) = generations
        content, reasoning, calls = generation.parts
        texts = [(StreamedBlock(0, REASONING), reasoning), (StreamedBlock(0, CONTENT), content)]
        for call in calls:
            id_ = serialize.call_id(generation.form, call.id, CALL_PREFIX)
            texts.append((StreamedBlock(0, 0, call.name, id_), call.arguments))
        written = [(block, text) for block, text in texts if text]
        items = [self._item(block, _item_id(block), "completed", text) for block, text in written]
        if items and generation.finish_reason is not FinishReason.STOP:
            items[-1]["status"] = "incomplete"
        return {**json.loads(self._echo), **_ended(generation, items), "store": await self._kept(items)}

    def events(self, part: ReceivedPart) -> Iterator[str]:
        if not self._events:
            begun = self._response({"status": "in_progress", "output": [], **_NOTHING})
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        cut = part.ended is not None and part.ended.finish_reason is not FinishReason.STOP
        for change in self._blocks.read(part):
            yield from self._item_events(change, cut=cut)
        self._ended = part.ended

    async def last(self) -> Iterator[str]:
        assert self._ended is not None
        ended = {**_ended(self._ended, self._items), "store": await self._kept(self._items)}
        return iter([self._event(f"response.{ended['status']}", response=self._response(ended))])

    def failed(self, refusal: Refusal) -> Iterator[str]:
        code = "rate_limit_exceeded" if refusal.status == 429 else "invalid_prompt"
        error = {
            "code": code if refusal.status < 500 else "server_error",
            "message": refusal.body["error"]["message"],
        }
        ended = {**_NOTHING, "status": "failed", "output": self._items, "error": error}
        yield self._event("response.failed", response=self._response(ended))

    async def _kept(self, items: Sequence[Json]) -> bool:
        """Keep the conversation, if that is wanted. Return whether it is kept: the answer does not depend on it."""
        if not self._transcript:
            return False
        whole = [item for item in items if item["type"] != "function_call" or item["status"] == "completed"]
        written = ",".join([self._transcript[1:-1], *map(json.dumps, whole)])
        if len(written) > MOST_KEPT:
            return False
        try:
            await self._keep(self._response_id, f"[{written}]".encode())
        except OutriderError as error:
            log.info("a response is not kept: %s", error)
            return False
        return True

    def _item_events(self, changed: BlockEvent, *, cut: bool) -> Iterator[str]:
        """Yield the events of a change; `cut`: the answer has ended before its end."""
        block = changed.block
        kind = DELTAS.get(block.call, CALL_DELTAS)
        if changed.change is BlockChange.BEGIN:
            self._id = _item_id(block)
        place: Json = {"item_id": self._id, "output_index": block.index}
        if block.call < 0:
            place["content_index"] = 0
        more: Json = {"logprobs": []} if block.call == CONTENT else {}
        match changed.change:
            case BlockChange.BEGIN:
                item = self._item(block, self._id, "in_progress", "")
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.call < 0:
                    yield self._event("response.content_part.added", **place, part=_part(block, ""))
            case BlockChange.TEXT:
                block.texts.append(changed.text)
                yield self._event(f"{kind}.delta", **place, delta=changed.text, **more)
            case BlockChange.END:
                text = "".join(block.texts)
                if block.call >= 0:
                    yield self._event(f"{kind}.done", **place, name=block.name, arguments=text)
                else:
                    yield self._event(f"{kind}.done", **place, text=text, **more)
                    yield self._event("response.content_part.done", **place, part=_part(block, text))
                status = "incomplete" if cut or block.failed else "completed"
                self._items.append(self._item(block, self._id, status, text))
                yield self._event("response.output_item.done", output_index=block.index, item=self._items[-1])

    def _item(self, block: StreamedBlock, id_: str, status: str, text: str) -> Json:
        head = {"id": id_, "status": status}
        if block.call >= 0:
            return {"type": "function_call", **head, "call_id": block.id, "name": block.name, "arguments": text}
        content = [] if status == "in_progress" else [_part(block, text)]
        if block.call == CONTENT:
            return {"type": "message", **head, "role": "assistant", "content": content}
        kept = write_reasoning(text) if self._encrypts and content else None
        return {"type": "reasoning", **head, "summary": [], "content": content, "encrypted_content": kept}

    def _response(self, state: Json) -> str:
        """Return the JSON of the response in some state."""
        return f"{self._echo[:-1]}, {json.dumps(state)[1:]}"

    def _event(self, type_: str, *, response: str = "", **content: object) -> str:
        """Return an event; `response`: its response, as JSON."""
        text = json.dumps({"type": type_, "sequence_number": self._events, **content})
        more = f', "response": {response}' if response else ""
        self._events += 1
        return f"event: {type_}\ndata: {text[:-1]}{more}}}\n\n"


def responses_format(body: ResponsesBody, terms: ResponseTerms, client: AsyncClient) -> ResponsesFormat:
    """Return the format of a request of /v1/responses."""
    keep = partial(client.keep_response, timeout=KEEP_S)
    return ResponsesFormat(body.echo, keep, body.transcript, encrypts=ENCRYPTED in (body.include or ()))


async def earlier_items(body: bytes, turn: AbstractAsyncContextManager[None], client: AsyncClient) -> bytes:
    """Return the conversation that a request of /v1/responses continues; empty if it continues none. The request is
    parsed in a `turn`, which has ended when the router is asked.

    Raises InvalidRequest where the earlier response is not known.
    """
    if b"previous_response_id" not in body:
        return b""
    async with turn:
        earlier = (await parse_body(ResponsesBody, body)).previous_response_id
    try:
        return b"" if earlier is None else await client.find_response(earlier, timeout=KEEP_S)
    except NotFound as error:
        raise InvalidRequest("previous_response_id", f"{error}; send the whole conversation") from None


_NOTHING: Json = {"error": None, "incomplete_details": None, "usage": None}


def _item_id(block: StreamedBlock) -> str:
    return PREFIXES.get(block.call, "fc_") + secrets.token_hex(12)


def _part(block: StreamedBlock, text: str) -> Json:
    if block.call == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _ended(generation: Generation, items: list[Json]) -> Json:
    """Return the state of a response that has ended. Reasons that OpenAI does not know become max_output_tokens."""
    whole = generation.finish_reason is FinishReason.STOP
    usage = generation.usage
    return {
        **_NOTHING,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "outrider": serialize.cost([generation], 1)["outrider"],
        },
        **serialize.speculation([generation]),
    }
