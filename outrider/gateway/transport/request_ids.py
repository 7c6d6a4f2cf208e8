"""The id of a request, in a header of its response: the caller's own, or a new one."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
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
                MutableHeaders(scope=message)[REQUEST_ID] = id_
            await send(message)

        await app(scope, receive, named)

    return numbering
