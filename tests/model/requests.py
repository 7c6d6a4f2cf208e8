"""A client: asks for one answer, puts together what it gets, and goes on elsewhere when a call breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from tests.model.language import STOP_ID
from tests.model.redis import Violation
from tests.model.wires import Ended, Link

Dial = Callable[[int, Callable[[Any], None]], Link]

_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
    types_pb2.FINISH_REASON_ABANDONED: "abandoned",
    types_pb2.FINISH_REASON_FAILED: "failed",
}
_TRY_AGAIN = ("", "Unavailable", "Overloaded", "Cancelled")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a client asks for."""

    key: str  # idempotency key
    prompt: tuple[int, ...]  # what follows the session's tokens, or all of them
    max_tokens: int = 12
    stops: tuple[str, ...] = ()
    session: str = ""  # the session that this turn belongs to
    whole_history: bool = False

    def request(self) -> pb.GenerateRequest:
        """On the wire."""
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.prompt),
            sampling=pb.Sampling(seed=1, temperature=0.0, max_tokens=self.max_tokens, stop=self.stops),
            session_id=self.session,
            whole_history=self.whole_history,
            idempotency_key=self.key,
        )


@dataclass(eq=False)
class Client:
    """One reader of one generation."""

    request: ModelRequest | None  # None: a client that only reads another client's generation
    dial: Dial
    session: str = ""
    generation: int = 0
    prompt: int = 0  # tokens
    tokens: list[int] = field(default_factory=list)  # of the answer
    text: str = ""
    reason: str = ""  # why it ended
    error: str = ""  # the last error it received, where another call is no use
    details: str = ""
    link: Link | None = None
    calls: int = 0
    skipped: int = 0  # tokens before the place where it began to read

    def __str__(self) -> str:
        return f"client {self.session}/{self.generation} at {self.prompt}+{len(self.tokens)}"

    @property
    def done(self) -> bool:
        """Whether it has its answer."""
        return bool(self.reason)

    @property
    def idle(self) -> bool:
        """Whether it would call, and does not."""
        return self.link is None and not self.reason and not self.error

    @property
    def position(self) -> tuple[int, int]:
        """Where it stands: the next position and the characters before it."""
        return (self.prompt + len(self.tokens), len(self.text)) if self.tokens or self.text else (0, 0)

    def call(self, router: int) -> None:
        """Asks, or goes on where it stands."""
        link = self.dial(router, lambda event: self._receive(link, event))
        self.link, self.error = link, ""
        self.calls += 1
        if self.session:
            position, offset = self.position
            request = pb.ResumeRequest(
                session_id=self.session, generation=self.generation, next_position=position, text_offset=offset
            )
            link.forth.put(request)
        else:
            assert self.request is not None
            link.forth.put(self.request.request())

    def call_again(self) -> None:
        """Continues at the next router."""
        self.call(self.calls % 2)

    def hang_up(self) -> None:
        """Breaks the call off; it may call again."""
        if self.link is not None:
            self.link.leave()
            self.link = None

    def _receive(self, link: Link, event: Any) -> None:
        if link is not self.link:
            return
        if isinstance(event, Ended):
            self.link = None
            self.details = event.details
            self.error = "" if event.error in _TRY_AGAIN or self.reason else event.error
            return
        match event.WhichOneof("event"):
            case "started":
                self._start(event.started)
            case "chunk":
                self._take(event.chunk)
            case "finished":
                self.reason = _REASONS[event.finished.reason]
                if event.finished.usage.completion_tokens != len(self.tokens):
                    raise Violation(
                        f"an answer of {len(self.tokens)} tokens is counted as {event.finished.usage.completion_tokens}"
                    )

    def _start(self, started: pb.Started) -> None:
        if self.session and (self.session, self.generation) != (started.session_id, started.generation):
            raise Violation("a resumed generation is another one")
        self.session, self.generation, self.prompt = started.session_id, started.generation, started.prompt_tokens

    def _take(self, chunk: pb.Chunk) -> None:
        position = self.prompt + len(self.tokens)
        if chunk.next_position - len(chunk.token_ids) != position:
            raise Violation(f"a client at {position} was sent {list(chunk.token_ids)} up to {chunk.next_position}")
        if chunk.text_offset - len(chunk.text) != len(self.text):
            raise Violation(
                f"a client with {len(self.text)} characters was sent {chunk.text!r} up to {chunk.text_offset}"
            )
        if STOP_ID in self.tokens and chunk.token_ids:
            raise Violation("tokens behind the end")
        self.tokens += chunk.token_ids
        self.text += chunk.text


@dataclass(eq=False)
class Canceller:
    """One call of Cancel."""

    session: str
    generation: int
    link: Link | None = None
    answered: bool = False
    refused: str = ""

    def call(self, dial: Dial, router: int) -> None:
        """Sends it."""
        self.link = dial(router, self._receive)
        self.link.forth.put(pb.CancelRequest(session_id=self.session))

    def _receive(self, event: Any) -> None:
        if isinstance(event, Ended):
            self.link, self.refused = None, event.error
        else:
            self.answered = True
