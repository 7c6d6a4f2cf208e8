"""The client for asyncio. It is the only implementation; `Client` drives it from a thread."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

from outrider.client import _wire
from outrider.client._access import Access
from outrider.client._connection import Connecting, resolve
from outrider.client._router import RETRIES, Router
from outrider.client._stream import AsyncStream
from outrider.client._types import Generation, Model, Session, StepTree
from outrider.client._wire import Options
from outrider.errors import InvalidRequest
from outrider.v1 import inference_pb2 as pb


class AsyncClient:
    """A connection to the router at `address` ("host:port"), made with the first call.

    What `address` and the keywords of `Connecting` leave out is the environment's (OUTRIDER_ROUTER, OUTRIDER_API_KEY or
    OUTRIDER_API_KEY_FILE, OUTRIDER_CA, OUTRIDER_SERVER_NAME), or else that of a profile (OUTRIDER_PROFILE, in the file
    OUTRIDER_PROFILES or ~/.config/outrider/profiles.toml). A key is not sent in the clear to other machines, unless
    `tls=False`. What cannot be raises ConfigError.

    Several routers may be given as gRPC writes them, "ipv4:HOST:PORT,HOST:PORT" with numeric hosts, or by a name that
    stands for all of them: streams go on at the next one when theirs ends.

    Every call raises the errors of `outrider.errors`: InvalidRequest, NotFound, Overloaded, Unavailable,
    DeadlineExceeded when `timeout` (seconds, None for no limit) passes, and so on. Use it on one event loop,
    as an async context manager or with `close`.

    What is tried again, within the call's timeout and after pauses that differ from caller to caller: a call that broke
    off, or whose router or verifier is not there, up to six times in a row that bring nothing (the first connection is
    not); one whose router goes down in order, at once; and a generation that there is no room for (Overloaded), up to
    `retries` times and after as long as the router says, if that is at most 30 s. Other errors are raised at once.
    """

    def __init__(self, address: str | None = None, *, retries: int = RETRIES, **connecting: Unpack[Connecting]) -> None:
        connection = resolve(address, **connecting)
        self._router = Router(connection.address, Access.of(connection), retries)

    @property
    def address(self) -> str:
        """The router's, as it was looked up."""
        return self._router.address

    async def generate(
        self, prompt: str | Sequence[int] | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer to a prompt, as text or as token ids, or to `messages`. See `Options` for the keywords."""
        stream = self.stream(prompt, timeout=timeout, **options)
        async for _ in stream:
            pass
        return stream.result

    async def samples(
        self, prompt: str | Sequence[int] | None, n: int, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> list[Generation]:
        """`n` answers to one prompt: the choices 0 to n - 1 of one seed, each a session of its own.

        The verifier reads the prompt once: the others begin when the first one has. When one fails, all end. `timeout`
        holds for each.
        """
        for option in ("choice", "session", "idempotency_key"):
            if option in options:
                raise InvalidRequest(option, "is not for several samples; each has its own")
        if n < 1:
            raise InvalidRequest("n", f"is {n}, must be at least 1")
        if options.get("seed") is None:
            options["seed"] = secrets.randbits(64)
        prompt_read = asyncio.Event()

        async def one(choice: int) -> Generation:
            if choice:
                await prompt_read.wait()
            own: Options = {**options, "choice": choice}
            stream = self.stream(prompt, timeout=timeout, **own)
            async for _ in stream:
                prompt_read.set()
            return stream.result

        tasks = [asyncio.create_task(one(choice)) for choice in range(n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stream(
        self, prompt: str | Sequence[int] | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The answer as it comes. The call starts with the first chunk that is asked for."""
        return AsyncStream(self._router, _wire.request_to_pb(prompt, **options), timeout)

    def resume(
        self,
        session: str,
        *,
        generation: int = 0,
        next_position: int = 0,
        text_offset: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """The latest generation of a session, from behind the last chunk that was received (or from its start).

        Streams resume by themselves while their client lives; this is for another process that goes on with one.
        The result holds what came through this stream. Raises NotFound when it is too late.
        """
        return AsyncStream(self._router, _wire.resume_to_pb(session, generation, next_position, text_offset), timeout)

    async def watch(self, session: str) -> AsyncGenerator[StepTree, None]:
        """A session's steps from now on: the trees that were verified, and what of them was accepted. Ends when the
        session is closed; raises NotFound."""
        request = pb.WatchSessionRequest(session_id=_wire.encodable("session", session))
        async with aclosing(self._router.listen("Watch", request)) as steps:
            async for step in steps:
                yield _wire.step_tree_from_pb(step)

    async def cancel(self, session: str, *, timeout: float | None = None) -> None:
        """Ends a session's generation, wherever it runs and whoever reads it. Fine if it has ended."""
        request = pb.CancelRequest(session_id=_wire.encodable("session", session))
        await self._router.ask("Cancel", request, timeout)

    async def create_session(self, model: str = "", *, timeout: float | None = None) -> Session:
        """An empty session for several turns. A generation without one makes its own."""
        request = pb.CreateSessionRequest(model=_wire.encodable("model", model))
        return _wire.session_from_pb(await self._router.ask("CreateSession", request, timeout))

    async def get_session(self, session: str, *, timeout: float | None = None) -> Session:
        """What is known of a session. Raises NotFound."""
        request = pb.GetSessionRequest(session_id=_wire.encodable("session", session))
        return _wire.session_from_pb(await self._router.ask("GetSession", request, timeout))

    async def close_session(self, session: str, *, timeout: float | None = None) -> None:
        """Ends a session and has its tokens forgotten. Fine if it was closed before."""
        request = pb.CloseSessionRequest(session_id=_wire.encodable("session", session))
        await self._router.ask("CloseSession", request, timeout)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that can be asked for right now."""
        response = await self._router.ask("ListModels", pb.ListModelsRequest(), timeout)
        return [_wire.model_from_pb(model) for model in response.models]

    async def close(self) -> None:
        """Ends the streams that still run, on the server too, and disconnects. Closing twice is fine."""
        await self._router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
