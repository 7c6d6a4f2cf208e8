"""What a client has received of an answer, over as many calls as it takes: where the next call goes on, the result."""

from __future__ import annotations

from typing import Any

from outrider.client import _wire
from outrider.client._types import Chunk, Generation, LogprobRows
from outrider.core.answers.answer_reader import ANY_TERMS, PLAIN_FORM, AnswerTerms, ModelForm
from outrider.errors import InternalError
from outrider.wire import inference as wire

GenerationRequest = wire.GenerateRequest | wire.ResumeRequest


class ReceivedAnswer:
    """The events of one generation."""

    def __init__(self, request: GenerationRequest, schema: Any = None, terms: AnswerTerms = ANY_TERMS) -> None:
        """`request`: that of the first call; `schema` and `terms` are its own, for the result."""
        self.request = request
        self.schema = schema
        self.terms = terms
        self.started: wire.Started | None = None
        self.follows = False  # another call runs the request
        self._chunks: list[Chunk] = []
        self._next: tuple[int, int] | None = None  # position and text offset after the last chunk

    @property
    def form(self) -> ModelForm:
        """How the model writes its answer, once the first event has arrived."""
        return ModelForm(self.started.tool_format, self.started.reasoning) if self.started else PLAIN_FORM

    def next_request(self, *, broke_off: bool = False) -> GenerationRequest:
        """Return the request of a call that goes on behind the last chunk; before the first event, that of the first
        call, whose idempotency key prevents a second generation. `broke_off`: the last call did, and not in order."""
        if self.started is None:
            if isinstance(self.request, wire.GenerateRequest):
                self.request.broke_off = broke_off and not self.follows
            return self.request
        position, offset = self._resume_point()
        return wire.ResumeRequest(
            session_id=self.started.session_id,
            generation=self.started.generation,
            next_position=position,
            text_offset=offset,
        )

    def add(self, message: wire.Chunk, *, keep: bool) -> Chunk:
        """Return the next chunk, and keep it for the result if need be. Raises InternalError for one that does not
        follow the last."""
        chunk = _wire.chunk_from_pb(message)
        position, offset = self._resume_point()
        if not chunk.prompt_logprobs:
            position = max(position, self._begun.prompt_tokens)
        count = len(chunk.token_ids) + len(chunk.prompt_logprobs)
        if (chunk.next_position - count, chunk.text_offset - len(chunk.text)) != (position, offset):
            raise InternalError(f"the router's chunk does not continue position {position}, text offset {offset}")
        self._next = chunk.next_position, chunk.text_offset
        if keep:
            self._chunks.append(chunk)
        return chunk

    def result(self, message: wire.Finished, resumes: int) -> Generation:
        """Return the complete generation, of which the calls broke off `resumes` times."""
        started, chunks = self._begun, self._chunks
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            gaps=tuple(gap for chunk in chunks for gap in chunk.gaps),
            finish_reason=_wire.reason_from_pb(message.reason),
            stop=message.stop,
            seed=started.seed,
            model=started.model,
            session_id=started.session_id,
            usage=_wire.usage_from_pb(message.usage),
            logprobs=LogprobRows(row for chunk in chunks for row in chunk.logprobs.rows),
            prompt_logprobs=LogprobRows(row for chunk in chunks for row in chunk.prompt_logprobs.rows),
            generation=started.generation,
            cached_tokens=started.cached_tokens,
            forked_from=started.forked_from,
            resumes=resumes,
            rule=started.rule,
            lossy=started.lossy,
            schema=self.schema,
            terms=self.terms,
            form=self.form,
            prompt_token_ids=tuple(started.prompt_token_ids),
        )

    @property
    def _begun(self) -> wire.Started:
        """The first event. Raises InternalError where another one came first."""
        if self.started is None:
            raise InternalError("the router's stream did not begin with Started")
        return self.started

    def _resume_point(self) -> tuple[int, int]:
        """Return the next position and text offset after the last chunk; before the first chunk, the request's."""
        if self._next is not None:
            return self._next
        if isinstance(self.request, wire.ResumeRequest):
            return self.request.next_position, self.request.text_offset
        return 0, 0
