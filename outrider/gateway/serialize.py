"""Serializes the SDK's results in OpenAI's format. Lists of tokens are iterators (see `json_pieces`)."""

from __future__ import annotations

import secrets
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import isnan
from typing import Any, Protocol

from outrider.client import FinishReason, Generation, LogprobRows, Model, ModelAdapter, TokenLogprobs
from outrider.core.answers.answer_reader import AnswerReader, ModelForm
from outrider.core.answers.call_reader import CONTENT, REASONING, CallPiece
from outrider.core.answers.formats import FORMATS, short_id
from outrider.gateway.schema import ResponseTerms

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamedText:
    """A part of a choice's text."""

    index: int  # of the choice
    text: str
    entries: Sequence[TokenLogprobs] | None  # of its tokens, if log-probabilities are wanted
    offset: int  # characters of the choice before it
    make_reader: Callable[[], AnswerReader]  # makes what divides the choice's text
    token_ids: Sequence[int] | None = None  # of its tokens, if they are wanted


class ResponseForm(Protocol):
    """The format of one endpoint's responses."""

    kind: str  # `object` of a complete answer
    piece: str  # `object` of a streamed part
    prefix: str  # of an answer's id
    prompt_in_choice: bool  # whether a prompt's token ids are in each choice, and not in the response

    def complete(self, index: int, generation: Generation) -> Json:
        """Return a choice that has ended."""

    def whole(self, generations: Sequence[Generation]) -> Json:
        """Return what a response has beside its choices, which have all ended."""

    def parts(self, piece: StreamedText) -> list[Json]:
        """Return the events of a part of a choice's text."""

    def last(self, index: int, reason: str) -> list[Json]:
        """Return the last events of a choice."""


class CompletionForm:
    """The format of /v1/completions, of one request."""

    kind = piece = "text_completion"
    prefix = "cmpl-"
    prompt_in_choice = True

    def __init__(self, asked: ResponseTerms) -> None:
        self._asked = asked
        self._columns: defaultdict[int, _Columns] = defaultdict(lambda: _Columns(asked))  # by choice

    def complete(self, index: int, generation: Generation) -> Json:
        prompt, entries = generation.prompt_logprobs, None
        if self._asked.alternatives is not None:
            entries = LogprobRows((*(prompt.rows if self._asked.echo else ()), *generation.logprobs.rows)) or None
        choice = self._choice(index, generation.text, entries, 0, reason(generation))
        if self._asked.token_ids:
            choice |= {"prompt_token_ids": iter(generation.prompt_token_ids), "token_ids": iter(generation.token_ids)}
        return choice if self._asked.prompt_logprobs is None else choice | _prompt(prompt, self._asked.prompt_logprobs)

    def whole(self, generations: Sequence[Generation]) -> Json:
        return {}

    def parts(self, piece: StreamedText) -> list[Json]:
        choice = self._choice(piece.index, piece.text, piece.entries, piece.offset, None)
        return [choice if piece.token_ids is None else choice | {"token_ids": piece.token_ids}]

    def last(self, index: int, reason: str) -> list[Json]:
        return [self._choice(index, "", None, 0, reason)]

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenLogprobs] | None, offset: int, reason: str | None
    ) -> Json:
        logprobs = None if entries is None else self._columns[index].of(entries, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatForm:
    """The format of /v1/chat/completions, of one request."""

    kind = "chat.completion"
    piece = "chat.completion.chunk"
    prefix = "chatcmpl-"
    prompt_in_choice = False

    def __init__(self, asked: ResponseTerms) -> None:
        self._asked = asked
        self._readers: dict[int, AnswerReader] = {}  # of streamed choices
        self._begun: set[int] = set()  # choices whose role was sent
        self._answered: set[int] = set()  # choices of which content or a call was sent

    def complete(self, index: int, generation: Generation) -> Json:
        (content, reasoning, calls), why = generation.parts, reason(generation)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call_id(generation.form, call.id), **_call(call.name, call.arguments)} for call in calls
            ]
        entries = self._rows(generation.logprobs) if generation.logprobs else None
        ids: Json = {"token_ids": iter(generation.token_ids)} if self._asked.token_ids else {}
        ended = _with_calls(why, bool(calls))
        return {"index": index, "message": message, "logprobs": entries, "finish_reason": ended, **ids}

    def whole(self, generations: Sequence[Generation]) -> Json:
        wanted, first = self._asked.prompt_logprobs, generations[0]
        ids: Json = {"prompt_token_ids": iter(first.prompt_token_ids)} if self._asked.token_ids else {}
        return ids if wanted is None else ids | _prompt(first.prompt_logprobs, wanted)

    def parts(self, piece: StreamedText) -> list[Json]:
        index = piece.index
        if index not in self._readers:
            self._readers[index] = piece.make_reader()
        reader = self._readers[index]
        deltas = self._deltas(index, reader.form, reader.read(piece.text))
        if piece.entries is not None or piece.token_ids is not None:
            deltas = deltas or [self._delta(index, {}, None, None)]
        if piece.entries is not None:
            deltas[-1]["logprobs"] = self._rows(piece.entries)
        if piece.token_ids is not None:
            deltas[-1]["token_ids"] = piece.token_ids
        return deltas

    def last(self, index: int, reason: str) -> list[Json]:
        reader = self._readers.pop(index, None)
        left = [] if reader is None else self._deltas(index, reader.form, reader.finish())
        if index not in self._answered:  # the choice has reasoning at most
            left += (
                [self._delta(index, {"content": ""}, None, None)] if index in self._begun else [self._role(index, "")]
            )
        return [*left, self._delta(index, {}, None, _with_calls(reason, reader is not None and reader.called))]

    def _deltas(self, index: int, form: ModelForm, pieces: Iterable[CallPiece]) -> list[Json]:
        """Return the events of pieces; before a choice's first one is its role, with content if that is some."""
        deltas = []
        for piece in pieces:
            if piece.failed:
                continue
            if index not in self._begun:
                deltas.append(self._role(index, "" if piece.call == CONTENT else None))
            if piece.call != REASONING:
                self._answered.add(index)
            deltas.append(self._piece(index, form, piece))
        return deltas

    def _role(self, index: int, content: str | None) -> Json:
        self._begun.add(index)
        return self._delta(index, {"role": "assistant", "content": content}, None, None)

    def _piece(self, index: int, form: ModelForm, piece: CallPiece) -> Json:
        if piece.call < 0:
            name = "reasoning_content" if piece.call == REASONING else "content"
            return self._delta(index, {name: piece.text}, None, None)
        if piece.name:
            call = {"index": piece.call, "id": call_id(form, piece.id), **_call(piece.name, piece.text)}
        else:
            call = {"index": piece.call, "function": {"arguments": piece.text}}
        return self._delta(index, {"tool_calls": [call]}, None, None)

    def _delta(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _rows(self, entries: Sequence[TokenLogprobs]) -> Json:
        return _rows(entries, as_ids=self._asked.tokens_as_ids)


def call_id(form: ModelForm, given: str, prefix: str = "call_") -> str:
    """Return the id of a call: the one that the model has `given`, or a new one."""
    new = f"{prefix}{secrets.token_hex(12)}"
    return given or (short_id(new) if FORMATS[form.tool_format].short_ids else new)


def _call(name: str, arguments: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _with_calls(reason: str, calls: bool) -> str:
    """Return why an answer ended, which for one with calls is that they are to be made."""
    return "tool_calls" if calls and reason == "stop" else reason


def reason(generation: Generation) -> str:
    """Return why a generation ended, in OpenAI's words. Reasons that OpenAI does not know become "length"."""
    return _REASONS.get(generation.finish_reason, "length")


def cost(generations: Sequence[Generation], n: int) -> Json:
    """Return the usage of all choices, `n` for each prompt, one prompt after another. A prompt counts once, and so does
    what was cached of it: its choices share it, so the one that found least came first.

    Beside OpenAI's figures it has the reason for no speculation, of the first choice that had none.
    """
    prompts = sum(generation.usage.prompt_tokens for generation in generations[::n])
    completion = sum(generation.usage.completion_tokens for generation in generations)
    accepted = sum(min(it.usage.accepted, it.usage.completion_tokens) for it in generations)
    verified = sum(generation.usage.verified for generation in generations)
    cached = sum(min(it.cached_tokens for it in generations[at : at + n]) for at in range(0, len(generations), n))
    statuses = [generation.usage.speculation for generation in generations]
    speculation = next((status for status in statuses if not status.drafting), statuses[0])
    return {
        **tokens(prompts, completion),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(generation.usage.reasoning_tokens for generation in generations),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, verified - accepted),
        },
        "outrider": {"speculation": speculation.reason, "explanation": speculation.explanation},
    }


def tokens(prompt: int, completion: int) -> Json:
    """Return the numbers of tokens, as OpenAI has them."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation(generations: Sequence[Generation]) -> Json:
    """Return what drafts brought, as vLLM has it: `metrics` of a response; empty where no step verified a draft.

    A step that verifies drafts accepts 0, 1, 2, ... of them: the histogram counts steps by that number.
    """
    usages = [generation.usage for generation in generations]
    tried, reached = (
        [sum(column) for column in zip_longest(*rows, fillvalue=0)]
        for rows in ([it.tried_by_depth for it in usages], [it.reached_by_depth for it in usages])
    )
    if not tried or not tried[0]:
        return {}
    steps, verified, accepted = tried[0], sum(it.verified for it in usages), sum(reached)
    lengths = [steps, *reached, 0]
    figures = {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / verified,
        "acceptance_histogram": [longer - far for longer, far in pairwise(lengths)],
        "num_spec_steps": steps,
        "num_draft_tokens": verified,
        "num_accepted_draft_tokens": accepted,
        "num_spec_tokens": len(tried),
    }
    return {"metrics": {"speculative_decoding": figures}}


def model(entry: Model) -> Json:
    """Return an entry of /v1/models."""
    return _listed(entry.name, entry.context)


def adapter(entry: ModelAdapter, context: int) -> Json:
    """Return an adapter's entry of /v1/models: `parent` is its model, `root` its folder."""
    return _listed(entry.name, context) | {"root": entry.folder, "parent": entry.model}


def _listed(name: str, context: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "context_window": context,
        "max_model_len": context,
    }


def models(entries: Sequence[Model]) -> list[Json]:
    """Return the entries of /v1/models: models, and each one's adapters behind it."""
    return [it for entry in entries for it in (model(entry), *(adapter(one, entry.context) for one in entry.adapters))]


def envelope(kind: str, id_: str, model: str, created: int, choices: Iterable[Json], **more: Any) -> Json:
    """Return the response object around some choices."""
    return {"id": id_, "object": kind, "created": created, "model": model, "choices": iter(choices), **more}


class _Columns:
    """Log-probabilities in the format of completions: one list for each field. It is for the tokens of one choice, in
    their order: a character may begin in one part of a stream and end in another."""

    def __init__(self, asked: ResponseTerms) -> None:
        self._alternatives = asked.alternatives or 0
        self._as_ids = asked.tokens_as_ids
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, entries: Sequence[TokenLogprobs], offset: int) -> Json:
        """Return the lists for the next tokens; `offset`: characters of the text before them.

        A token that ends within a character does not move the offset: the character begins where it did.
        """
        return {
            "tokens": (_name(entry.id, entry.text, as_id=self._as_ids) for entry in entries),
            "token_logprobs": (None if isnan(entry.logprob) else entry.logprob for entry in entries),
            "top_logprobs": (_with_chosen(entry, self._alternatives, as_ids=self._as_ids) for entry in entries),
            "text_offset": self._offsets(entries, offset),
        }

    def _offsets(self, entries: Iterable[TokenLogprobs], offset: int) -> Iterator[int]:
        for entry in entries:
            yield offset
            offset += len(self._decoder.decode(entry.text))


def _with_chosen(entry: TokenLogprobs, count: int, *, as_ids: bool) -> dict[str, float] | None:
    """Return the `count` likeliest tokens, and the chosen one, with their log-probabilities; None for a prompt's first
    token, which has none."""
    if isnan(entry.logprob):
        return None
    top = zip(entry.top[:count], entry.top_texts, strict=False)
    likeliest = {_name(id_, text, as_id=as_ids): logprob for (id_, logprob), text in top}
    return {**likeliest, _name(entry.id, entry.text, as_id=as_ids): entry.logprob}


def _prompt(rows: Sequence[TokenLogprobs], count: int) -> Json:
    """Return the log-probabilities of a prompt in vLLM's format: for each token an object of the token itself and the
    `count` likeliest ones, by their ids; null for the first token."""
    return {"prompt_logprobs": (None if isnan(entry.logprob) else _ranked(entry, count) for entry in rows)}


def _ranked(entry: TokenLogprobs, count: int) -> Json:
    likeliest = zip(entry.top[:count], entry.top_texts, range(1, count + 1), strict=False)
    found = [(entry.id, entry.logprob, entry.text, entry.rank)]
    found += [(id_, logprob, text, rank) for (id_, logprob), text, rank in likeliest]
    return {
        str(id_): {"logprob": logprob, "rank": rank, "decoded_token": _shown(text)}
        for id_, logprob, text, rank in found
    }


class PromptText:
    """The text of a prompt, from the bytes of its tokens. A part ends where a character does."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, rows: Sequence[TokenLogprobs]) -> str:
        """Return the text that the next tokens complete."""
        return self._decoder.decode(b"".join(entry.text for entry in rows))


def _rows(entries: Sequence[TokenLogprobs], *, as_ids: bool) -> Json:
    """Return log-probabilities in the format of chats: one object for each token."""

    def row(id_: int, text: bytes, logprob: float) -> Json:
        return {"token": _name(id_, text, as_id=as_ids), "logprob": logprob, "bytes": [*text]}

    return {
        "content": (
            {
                **row(entry.id, entry.text, entry.logprob),
                "top_logprobs": [
                    row(id_, text, logprob) for (id_, logprob), text in zip(entry.top, entry.top_texts, strict=True)
                ],
            }
            for entry in entries
        ),
        "refusal": None,
    }


def _name(id_: int, text: bytes, *, as_id: bool) -> str:
    return f"token_id:{id_}" if as_id else _shown(text)


def _shown(text: bytes) -> str:
    """Return a token's text; bytes that are not whole characters are written as OpenAI does."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
