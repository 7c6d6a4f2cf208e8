"""The id of a request, in a header of its response: the caller's own, or a new one."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"  # the header, and the key in a request's scope
ANTHROPIC_ID = "request-id"  # the header's name for Anthropic's clients
TAKEN = re.compile(r"[\x21-\x7e]{1,128}")


def numbered(app: ASGIApp) -> ASGIApp:
    """Return middleware that puts the ids into responses."""

    async def numbering(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        id_ = given if TAKEN.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = headers[ANTHROPIC_ID] = id_
            await send(message)

        await app({**scope, REQUEST_ID: id_}, receive, named)

    return numbering
