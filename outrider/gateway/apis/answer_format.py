"""The format of one API's answers: what the parts of an answer become, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Protocol

from outrider.client import Generation
from outrider.gateway.errors import Refusal
from outrider.gateway.multiplex import ReceivedPart
from outrider.gateway.serialize import Json

KEEP_ALIVE = ": keep-alive\n\n"  # a comment, which clients ignore and proxies count as life


class AnswerFormat(Protocol):
    """The format of the answers of one request."""

    keep_alive: str  # event of a stream that waits
    keeps_text: bool  # a stream's last events have its whole text, which is held until then

    async def body(self, generations: Sequence[Generation]) -> Json:
        """Return the body of complete answers; an iterator in it is a list (see `json_pieces`)."""

    def events(self, part: ReceivedPart) -> Iterable[str]:
        """Yield the events of a further part of a stream."""

    async def last(self) -> Iterable[str]:
        """Return the events behind the end of all answers."""

    def failed(self, refusal: Refusal) -> Iterable[str]:
        """Yield the last events of a stream that fails."""


def event(content: Json, name: str = "") -> str:
    """Return a server-sent event."""
    field = f"event: {name}\n" if name else ""
    return f"{field}data: {json.dumps(content, default=list)}\n\n"
