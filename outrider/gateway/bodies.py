"""Reads and parses a request's body."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outrider.core.json_bounds import check_json
from outrider.errors import Cancelled
from outrider.gateway.schema import RequestBody

QUICK_BYTES = 2**14  # a body of this size takes a few milliseconds at most

BodyT = TypeVar("BodyT", bound=RequestBody)


class LargeBodies:
    """Turns in which larger bodies are parsed and made into calls of the router.

    A parsed body may take ten times its bytes, so there is one at a time; what waits for its turn is bytes. The event
    loop runs other tasks between two turns, and between the steps of one.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for the turn of a body of `size` bytes, and hold it in the context."""
        if size <= QUICK_BYTES:
            yield
            return
        async with self._turn:
            await asyncio.sleep(0)
            yield
            await asyncio.sleep(0)


async def read_body(request: Request) -> bytes:
    """Return the bytes of a request's body, which is JSON. FastAPI itself would keep them until the answer has ended.

    Raises Cancelled, and HTTPException for another type of content.
    """
    try:
        body = b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise Cancelled("the client has gone") from None
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not media_type.startswith("application/") or not media_type.endswith(("/json", "+json")):
        raise HTTPException(400, "the content-type must be application/json")
    return body


async def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Return a body as a `kind`.

    Raises InvalidRequest for a body of too many parts before it is parsed, so that parsing takes neither long nor much
    memory; RequestValidationError for what is no `kind`.
    """
    check_json("", body)
    await asyncio.sleep(0)
    gc.disable()  # collections would go through what is parsed again and again, and none of it is garbage
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    finally:
        gc.enable()


def small_body(kind: type[BodyT]) -> Callable[[Request], Awaitable[BodyT]]:
    """Return a FastAPI dependency: the request's body, which has a few fields, as a `kind`."""

    async def read(request: Request) -> BodyT:
        return await parse_body(kind, await read_body(request))

    return read
