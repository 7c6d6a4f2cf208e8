"""Authentication of callers: an API key names a tenant. A call is judged before its message is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from outrider.errors import DeadlineExceeded, Forbidden, InvalidRequest, Overloaded, Unauthenticated
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.limits.rate_limits import CHECKING, CallRates, address_of
from outrider.limits.slow_refusals import SlowRefusals
from outrider.rpc.authorization import MESSAGE_S, OUTRIDER_PREFIX, Context, JudgedCalls, read_message
from outrider.store.api_keys import ApiKey, Keys
from outrider.wire import inference as wire
from outrider.wire.drafter import CONNECT, DRAFT, TARGETS
from outrider.wire.message_bounds import more_fields_than

MAX_READS = 16  # messages of one tenant that arrive at the same time; further ones wait
HEALTH_READS = 8  # messages of health checks that arrive at the same time, which callers without a key may send
HEALTH_READ_S = 2.0  # time that such a message may take to arrive
HEALTH_BYTES = 1024  # its size
MAX_HEALTH_CALLS = 256  # calls of health at the same time
MAX_REFLECTION_CALLS = 4  # calls of reflection at the same time
REFLECTION_S = 10.0  # time that one may take
MAX_FIELDS = 16_384  # of a Generate request; 4,096 messages, and all that a Sampling may list
MAX_OTHER_BYTES = 2**16  # of the messages of the other methods, which hold names and numbers

DRAFTERS_METHODS = {CONNECT, DRAFT, TARGETS}
_SCHEME = "bearer "  # in lower case; RFC 7235 makes schemes case-insensitive
_LONG = {  # methods whose messages have texts
    "/outrider.v1.Inference/Generate": wire.GenerateRequest.DESCRIPTOR,
    "/outrider.v1.Inference/Tokenize": wire.TokenizeRequest.DESCRIPTOR,
    "/outrider.v1.Inference/Detokenize": wire.DetokenizeRequest.DESCRIPTOR,
    "/outrider.v1.Inference/KeepResponse": wire.KeepResponseRequest.DESCRIPTOR,
}
_HEALTH_PREFIX = "/grpc.health."
_TENANT: ContextVar[str] = ContextVar("tenant")  # of the call that runs


class Authenticator:
    """Maps a call to its tenant. This one allows every caller, and all are one tenant."""

    async def tenant(self, context: Context, method: str) -> str:
        """Return the caller's tenant. Raises Unauthenticated if the caller may not call at all, Forbidden for a key
        that does not open this method, Unavailable without Redis."""
        key = await self.key(context, method)
        return "" if key is None else key.tenant

    async def key(self, context: Context, method: str) -> ApiKey | None:
        """Return the caller's key; None: none is needed. Raises as `tenant`."""
        return None


class ApiKeyAuthenticator(Authenticator):
    """A caller with an API key is allowed, for the key's tenant."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def key(self, context: Context, method: str) -> ApiKey | None:
        credentials = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if (
            len(credentials) != 1
            or not isinstance(credentials[0], str)
            or not credentials[0].lower().startswith(_SCHEME)
        ):
            raise Unauthenticated(
                "an API key is needed: set OUTRIDER_API_KEY, or send the metadata `authorization: Bearer KEY`; "
                "`outrider keys add` makes one"
            )
        key = await self._keys.find(credentials[0][len(_SCHEME) :])
        needed = "drafter" if method in DRAFTERS_METHODS else "caller"
        if key.role != needed:
            raise Forbidden(
                f"this API key is for a {key.role}; `outrider keys add {key.tenant} --role {needed}` makes one for this"
            )
        return key


class JudgedByKey(JudgedCalls):
    """Lets in the callers that the authenticator knows, and everybody to health and reflection, within bounds."""

    def __init__(self, authenticator: Authenticator, rates: CallRates) -> None:
        self._authenticator = authenticator
        self._rates = rates
        self._reads: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant, while used
        self._health_reads = asyncio.Semaphore(HEALTH_READS)
        self._health_calls = _keyless_calls("health", MAX_HEALTH_CALLS)
        self._reflection_calls = _keyless_calls("reflection", MAX_REFLECTION_CALLS)
        self._strangers, self._refusals = SlowRefusals(), SlowRefusals()  # by address, and by tenant

    @asynccontextmanager
    async def admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        """Run a call of Outrider for its tenant, and others within their bounds."""
        if method.startswith(OUTRIDER_PREFIX):
            tenant = await self._tenant(method, context)
            await self._count_call(tenant or address_of(context.peer()), tenant, method)
            run_for(tenant)
            yield
        elif method.startswith(_HEALTH_PREFIX):
            with self._health_calls.hold():
                yield
        else:
            with self._reflection_calls.hold():
                try:
                    async with asyncio.timeout(REFLECTION_S):
                        yield
                except TimeoutError:
                    raise DeadlineExceeded(f"{method}: a call may take {REFLECTION_S:g} s") from None

    async def _tenant(self, method: str, context: Context) -> str:
        """Return the caller's tenant. Raises what the authenticator raises, and Overloaded.

        A gateway's checks are not held: it has places for few, and holds the refusals of its callers itself.
        """
        try:
            self._rates.count_address(context.peer())
            return await self._authenticator.tenant(context, method)
        except (Forbidden, Overloaded, Unauthenticated):
            if method.rpartition("/")[2] not in CHECKING:
                await self._strangers.hold(address_of(context.peer()))
            raise

    async def _count_call(self, caller: str, tenant: str, method: str) -> None:
        """Count a call. One that ends something is served over its rate, but held. Raises Overloaded."""
        try:
            over = self._rates.count_call(tenant, method.rpartition("/")[2])
        except Overloaded:
            await self._refusals.hold(caller)
            raise
        if over:
            await self._refusals.hold(caller)

    async def read(self, method: str, context: Context) -> bytes:
        """Return the message of a call. Raises InvalidRequest."""
        if method.startswith(OUTRIDER_PREFIX):
            async with self._reads.setdefault(caller_tenant(), asyncio.Semaphore(MAX_READS)):
                message = await read_message(context, MESSAGE_S)
            check_message(method, message)
            return message
        async with self._health_reads:
            message = await read_message(context, HEALTH_READ_S)
        if len(message) > HEALTH_BYTES:
            raise InvalidRequest("message", f"has {len(message)} bytes, must have at most {HEALTH_BYTES}")
        return message

    def decode(self, method: str, decode: Callable[[bytes], Any], message: bytes) -> Any:
        """Return a message of a call that has many, if it is within the bounds of one. Raises InvalidRequest."""
        if method.startswith(OUTRIDER_PREFIX):
            check_message(method, message)
        return decode(message)


def _keyless_calls(kind: str, most: int) -> ConcurrencyLimit:
    return ConcurrencyLimit(f"{kind}: {most} calls run already; try again", most)


def run_for(tenant: str) -> None:
    """Make the current task run a call of this tenant."""
    _TENANT.set(tenant)


def caller_tenant() -> str:
    """Return the tenant of the call that the current task runs. Raises LookupError where none was admitted."""
    return _TENANT.get()


def check_message(method: str, message: bytes) -> None:
    """Raise InvalidRequest for a message that would take far more memory than it has bytes, or has too many."""
    if method not in _LONG:
        if len(message) > MAX_OTHER_BYTES:
            raise InvalidRequest("message", f"has {len(message)} bytes, must have at most {MAX_OTHER_BYTES}")
    elif more_fields_than(_LONG[method], MAX_FIELDS, message):
        raise InvalidRequest(
            "message", f"must have at most {MAX_FIELDS} entries: messages, and what `sampling` lists, together"
        )
