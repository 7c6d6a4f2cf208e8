"""Reads a request's body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outrider.errors import Cancelled
from outrider.gateway.schema import GenerationForm

FormT = TypeVar("FormT", bound=GenerationForm)


def read_body(kind: type[FormT]) -> Callable[[Request], Awaitable[FormT]]:
    """Return a FastAPI dependency: the request's body as a `kind`.

    FastAPI itself would keep the body's bytes and all of its JSON until the answer has ended. Here only what was parsed
    remains.
    """

    async def read(request: Request) -> FormT:
        try:
            body = b"".join([part async for part in request.stream()])
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if not media_type.startswith("application/") or not media_type.endswith(("/json", "+json")):
                raise HTTPException(400, "the content-type must be application/json")
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
        except ClientDisconnect:
            raise Cancelled("the client has gone") from None

    return read
