"""The format of completions and of chats: one or several choices, in OpenAI's envelope."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from outrider.client import AsyncClient, Generation
from outrider.gateway import serialize
from outrider.gateway.apis.answer_format import KEEP_ALIVE, event
from outrider.gateway.errors import Refusal
from outrider.gateway.multiplex import ReceivedPart
from outrider.gateway.schema import Chat, Completion, ResponseTerms
from outrider.gateway.serialize import ChatForm, CompletionForm, Json, PromptText, ResponseForm, StreamedText


class ChoicesFormat:
    """The choices of all prompts of a request."""

    keep_alive = KEEP_ALIVE
    keeps_text = False

    def __init__(self, form: ResponseForm, terms: ResponseTerms) -> None:
        """`form`: of each choice."""
        self._form = form
        self._terms = terms
        self._head: Json = {
            "id_": form.prefix + secrets.token_hex(12),
            "model": terms.model,
            "created": int(time.time()),
        }
        self._characters: defaultdict[int, int] = defaultdict(int)  # sent so far, of each choice
        self._tokens: defaultdict[int, int] = defaultdict(int)  # of each choice so far
        self._prompts: dict[int, int] = {}  # tokens of each prompt
        self._prompt_texts: defaultdict[int, PromptText] = defaultdict(PromptText)  # of those that are echoed
        self._unsent_prompts: dict[int, Sequence[int]] = {}  # by choice: ids that its first event is to have
        self._ended: dict[int, Generation] = {}

    async def body(self, generations: Sequence[Generation]) -> Json:
        choices = (self._form.complete(index, generation) for index, generation in enumerate(generations))
        more = self._form.whole(generations)
        return serialize.envelope(self._form.kind, **self._head, choices=choices, **self._cost(generations), **more)

    def events(self, part: ReceivedPart) -> Iterator[str]:
        index, chunk = part.index, part.chunk
        if part.prompt_token_ids:  # the first choice of a prompt begins before the others
            choices = range(index, index + self._terms.n)
            self._unsent_prompts |= dict.fromkeys(choices, part.prompt_token_ids)
        if chunk is not None and not chunk.prompt_logprobs:
            self._tokens[index] += len(chunk.token_ids)
            self._prompts.setdefault(index // self._terms.n, chunk.next_position - self._tokens[index])
        ids = chunk.token_ids if chunk is not None and self._terms.token_ids else None
        if chunk is not None and (chunk.text or chunk.logprobs or chunk.prompt_logprobs or ids):
            text = chunk.text + self._prompt_texts[index].add(chunk.prompt_logprobs)
            entries = (chunk.prompt_logprobs or chunk.logprobs) if self._terms.alternatives is not None else None
            streamed = StreamedText(index, text, entries, self._characters[index], part.reader, ids)
            for piece in self._form.parts(streamed):
                yield self._event(piece)
            self._characters[index] += len(text)
        if part.ended is not None:
            self._ended[index] = part.ended
            for piece in self._form.last(index, serialize.reason(part.ended)):
                yield self._event(piece)

    async def last(self) -> list[str]:
        done = "data: [DONE]\n\n"
        if not self._terms.include_usage:
            return [done]
        cost = self._cost([self._ended[index] for index in sorted(self._ended)])
        return [event(serialize.envelope(self._form.piece, **self._head, choices=[], **cost)), done]

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield event(refusal.body)

    def _event(self, choice: Json) -> str:
        # as OpenAI has it in all events but the last
        usage: Json = {"usage": None} if self._terms.include_usage else {}
        if self._terms.continuous_usage:
            usage = {"usage": serialize.tokens(sum(self._prompts.values()), sum(self._tokens.values()))}
        prompt = self._unsent_prompts.pop(choice["index"], None)
        ids: Json = {} if prompt is None else {"prompt_token_ids": prompt}
        if self._form.prompt_in_choice:
            choice, ids = choice | ids, {}
        return event(serialize.envelope(self._form.piece, **self._head, choices=[choice], **usage, **ids))

    def _cost(self, generations: Sequence[Generation]) -> Json:
        return {"usage": serialize.cost(generations, self._terms.n), **serialize.speculation(generations)}


def completion_format(body: Completion, terms: ResponseTerms, client: AsyncClient) -> ChoicesFormat:
    """Return the format of a request of /v1/completions."""
    return ChoicesFormat(CompletionForm(terms), terms)


def chat_format(body: Chat, terms: ResponseTerms, client: AsyncClient) -> ChoicesFormat:
    """Return the format of a request of /v1/chat/completions."""
    return ChoicesFormat(ChatForm(terms), terms)
