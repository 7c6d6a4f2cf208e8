"""The client for asyncio. It is the only implementation; `Client` runs it on a thread."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Self, Unpack

from outrider.client import _wire
from outrider.client._connection import Access, ConnectionOptions, key_metadata, resolve
from outrider.client._router import RETRIES, Router
from outrider.client._stream import AsyncStream
from outrider.client._terms import terms_of
from outrider.client._types import Generation, Model, ModelAdapter, Session, StepTree, TokenizedPrompt
from outrider.client._wire import Options
from outrider.errors import ConfigError, InvalidRequest, Unauthenticated
from outrider.wire import inference as wire


class AsyncClient:
    """A connection to the router at `address` ("host:port"), opened by the first call.

    Values that `address` and the keywords of `ConnectionOptions` leave out come from the environment (OUTRIDER_ROUTER,
    OUTRIDER_API_KEY or OUTRIDER_API_KEY_FILE, OUTRIDER_CA, OUTRIDER_SERVER_NAME), else from a profile
    (OUTRIDER_PROFILE, in the file OUTRIDER_PROFILES or ~/.config/outrider/profiles.toml). The client does not send a
    key in the clear to other machines, unless `tls=False`. Invalid settings raise ConfigError.

    Several routers may be given in gRPC's syntax, "ipv4:HOST:PORT,HOST:PORT" with numeric hosts, or by a DNS name that
    resolves to all of them: streams continue at the next router when their router ends.

    Every call raises the errors of `outrider.errors`: InvalidRequest, NotFound, Overloaded, Unavailable,
    DeadlineExceeded when `timeout` (seconds, None for no limit) passes, and so on. Use a client on one event loop,
    as an async context manager or with `close`.

    The client retries within the call's timeout, after pauses with random jitter:

    - a call that broke off, or whose router or verifier cannot be reached: up to six times in a row without a new
      token. The first connection is not retried;
    - a call whose router shuts down in order: at once;
    - a generation for which the cluster has no capacity (Overloaded): up to `retries` times, after the pause that the
      router requests, if that is at most 30 s.

    Other errors are raised at once.
    """

    def __init__(
        self, address: str | None = None, *, retries: int = RETRIES, **connecting: Unpack[ConnectionOptions]
    ) -> None:
        connection = resolve(address, **connecting)
        self._router = Router(connection.address, Access.of(connection), retries)

    @property
    def address(self) -> str:
        """The router's address, from the arguments, the environment or a profile."""
        return self._router.address

    async def generate(
        self, prompt: str | Sequence[int] | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """Generate the answer to a prompt (text or token ids) or to `messages`. See `Options` for the keywords."""
        stream = self.stream(prompt, timeout=timeout, **options)
        async for _ in stream:
            pass
        return stream.result

    async def samples(
        self, prompt: str | Sequence[int] | None, n: int, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> list[Generation]:
        """Generate `n` answers to one prompt: the choices 0 to n - 1 of one seed, each in a separate session.

        The verifier reads the prompt once: the other answers begin when the first one has its first tokens. When one
        answer fails, all are cancelled. `timeout` applies to each answer.
        """
        for option in ("choice", "session", "idempotency_key"):
            if option in options:
                raise InvalidRequest(option, "is not for several samples; each has its own")
        if n < 1:
            raise InvalidRequest("n", f"is {n}, must be at least 1")
        if options.get("seed") is None:
            options["seed"] = secrets.randbits(64)
        prompt_read = asyncio.Event()
        first = self.stream(prompt, timeout=timeout, **options)

        async def one(choice: int) -> Generation:
            if choice:
                await prompt_read.wait()
            stream = first.with_choice(choice) if choice else first
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
        """Return the answer as a stream. The call starts when the first chunk is requested."""
        request = _wire.request_to_pb(prompt, **options)
        return AsyncStream(self._router, request, timeout, options.get("schema"), terms_of(options))

    def resume(
        self,
        session: str,
        *,
        generation: int = 0,
        next_position: int = 0,
        text_offset: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Resume the latest generation of a session after the last chunk that was received, or from its start.

        Streams resume automatically while their client lives; this method is for another process that continues one.
        The result holds only what this stream received. Raises NotFound when the generation can no longer be resumed.
        """
        return AsyncStream(self._router, _wire.resume_to_pb(session, generation, next_position, text_offset), timeout)

    async def watch(self, session: str) -> AsyncGenerator[StepTree, None]:
        """Yield a session's steps from now on: the verified trees and their accepted nodes.

        The last step is the one before the session is closed. Raises NotFound.
        """
        request = wire.WatchSessionRequest(session_id=_wire.encodable("session", session))
        async with aclosing(self._router.listen("Watch", request)) as steps:
            async for step in steps:
                yield _wire.step_tree_from_pb(step)

    async def cancel(self, session: str, *, timeout: float | None = None) -> None:
        """Cancel a session's generation, whichever router and client it belongs to. Do nothing if it has ended."""
        request = wire.CancelRequest(session_id=_wire.encodable("session", session))
        await self._router.ask("Cancel", request, timeout)

    async def create_session(self, model: str = "", *, timeout: float | None = None) -> Session:
        """Create an empty session for several turns. A generation without a session creates one."""
        request = wire.CreateSessionRequest(model=_wire.encodable("model", model))
        return _wire.session_from_pb(await self._router.ask("CreateSession", request, timeout))

    async def get_session(self, session: str, *, timeout: float | None = None) -> Session:
        """Return the state of a session. Raises NotFound."""
        request = wire.GetSessionRequest(session_id=_wire.encodable("session", session))
        return _wire.session_from_pb(await self._router.ask("GetSession", request, timeout))

    async def close_session(self, session: str, *, timeout: float | None = None) -> None:
        """End a session and delete its tokens. Do nothing if it is closed already."""
        request = wire.CloseSessionRequest(session_id=_wire.encodable("session", session))
        await self._router.ask("CloseSession", request, timeout)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that are served now."""
        response = await self._router.ask("ListModels", wire.ListModelsRequest(), timeout)
        return [_wire.model_from_pb(model) for model in response.models]

    async def tokenize(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        special: bool = True,
        count_only: bool = False,
        names: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> TokenizedPrompt:
        """Return the tokens of a prompt, or of `messages` as the model's chat template renders them with their tools.
        Nothing is generated.

        `special`: with the tokens that the tokenizer itself puts around a text; `count_only`: return their number
        alone; `names`: return the tokens' names, too. `options`: as of `generate`; those that are about the answer have
        no effect. Raises InvalidRequest for a prompt far longer than the model's context.
        """
        request = wire.TokenizeRequest(
            prompt=_wire.request_to_pb(prompt, **options),
            without_special=not special,
            count_only=count_only,
            with_names=names,
        )
        return _wire.tokenized_from_pb(await self._router.ask("Tokenize", request, timeout))

    async def detokenize(self, tokens: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Return the text of a model's tokens, special ones included; `model`: empty for the only one.

        Raises InvalidRequest for ids outside the vocabulary, and for more tokens than the model's context has.
        """
        request = wire.DetokenizeRequest(
            model=_wire.encodable("model", model), tokens=_wire.token_ids("tokens", tokens)
        )
        text: str = (await self._router.ask("Detokenize", request, timeout)).text
        return text

    async def load_adapter(
        self, name: str, folder: str, *, model: str = "", timeout: float | None = None
    ) -> ModelAdapter:
        """Have all verifiers of a model load a low-rank adapter (LoRA); requests may name it as their model then.

        `folder`: that of the adapter in PEFT's format, below the one in which the verifiers have their adapters; with
        API keys below the tenant's folder there, unless the routers' `adapter_publishers` name the tenant. An adapter
        of the tenant that has the name already is replaced: sessions that have it keep the old one. `model`: empty for
        the only one.

        Raises Forbidden unless the routers' `adapter_loaders` name the tenant; NotFound where there is no such folder;
        InvalidRequest for an adapter of another model, or of a kind that cannot be served; Unavailable without a
        verifier.
        """
        request = wire.LoadAdapterRequest(name=name, folder=folder, model=model)
        return _wire.adapter_from_pb(await self._router.ask("LoadAdapter", request, timeout))

    async def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Take an adapter's name away. Sessions that have it go on. Raises Forbidden as `load_adapter`; NotFound."""
        await self._router.ask("UnloadAdapter", wire.UnloadAdapterRequest(name=name), timeout)

    async def keep_response(self, response_id: str, items: bytes, *, timeout: float | None = None) -> None:
        """Keep a conversation up to a response, as gateways do. It expires as a session does.

        Raises InvalidRequest for more than 1 MiB, Overloaded where the tenant keeps too much.
        """
        request = wire.KeepResponseRequest(id=_wire.encodable("id", response_id), items=items)
        await self._router.ask("KeepResponse", request, timeout)

    async def find_response(self, response_id: str, *, timeout: float | None = None) -> bytes:
        """Return a conversation that was kept. Raises NotFound."""
        request = wire.FindResponseRequest(id=_wire.encodable("id", response_id))
        items: bytes = (await self._router.ask("FindResponse", request, timeout)).items
        return items

    async def check_key(self, api_key: str, *, timeout: float | None = None) -> str:
        """Return the tenant of a key, which need not be the client's own; empty where callers need no key.

        Raises Unauthenticated unless the router accepts the key.
        """
        try:
            metadata = key_metadata(api_key)
        except ConfigError as error:
            raise Unauthenticated(str(error)) from None
        response: wire.CheckKeyResponse = await self._router.ask("CheckKey", wire.CheckKeyRequest(), timeout, metadata)
        return response.tenant

    async def close(self) -> None:
        """End the streams that still run, on the server too, and disconnect. Closing twice is allowed."""
        await self._router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
