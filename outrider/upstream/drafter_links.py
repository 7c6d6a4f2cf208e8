"""Attaches drafters to the sessions of an upstream that has no router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

import grpc
import grpc.aio

from outrider.errors import OutriderError
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import DRAFTER, Tls
from outrider.upstream.foreign_session import EPOCH, ForeignSession
from outrider.upstream.own_tickets import OwnTickets
from outrider.wire import drafter as wire
from outrider.wire.tickets import OWN_TENANT, TICKET_S, Permit

CALL_S = 2.0  # time that a drafter has to answer
LOOK_S = 1.0  # between two looks at the drafters, and at sessions that have none
RENEW_S = TICKET_S / 3  # between two tickets of a session

UNCERTAIN = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)  # what became of the call

log = logging.getLogger(__name__)


class DrafterLink:
    """A drafter at an address, as it described itself last."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub = wire.DrafterStub(channel)
        self.described: wire.DrafterDescription | None = None  # None: it does not answer, or has another tokenizer
        self.attached: set[str] = set()  # sessions
        self.said = ""  # in the log

    @property
    def free(self) -> int:
        """Slots that are free, as far as is known."""
        if self.described is None:
            return 0
        return self.described.slots - max(self.described.sessions, len(self.attached))

    async def look(self, tokenizer_digest: bytes) -> None:
        """Ask the drafter what it is."""
        try:
            found = await self.stub.Describe(wire.DescribeRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            self.described = None
            self._say(f"cannot be reached ({error.details() or error.code().name.lower()}); drafts go on without it")
            return
        if found.tokenizer_digest != tokenizer_digest:
            self.described = None
            self._say("uses another tokenizer than this model; draft with a model of the same family")
            return
        self.described = found
        self._say(f"drafts with {found.model}, {found.slots} sessions at once")

    def _say(self, what: str) -> None:
        if what != self.said:
            self.said = what
            log.info("drafter %s %s", self.address, what)


class RegisteredDrafters:
    """The addresses of drafters that draft for verifiers, as they announce themselves in Redis."""

    def __init__(self, redis_url: str) -> None:
        """Raises ConfigError for a malformed URL."""
        from outrider.store.redis.client import connect
        from outrider.store.registry import Registry

        self._redis = connect(redis_url)
        self._registry = Registry(self._redis)
        self._known: list[str] = []

    async def __call__(self) -> list[str]:
        """Return the addresses now, or those of the last time while Redis cannot be reached."""
        with suppress(OutriderError):
            workers = await self._registry.workers("drafter")
            self._known = [it.address for it in workers if it.tier == 0 and not it.draining]
        return self._known

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()


class DrafterLinks:
    """Gives each session some drafters, those with the most free slots first."""

    def __init__(
        self,
        addresses: Callable[[], Awaitable[Iterable[str]]],
        tickets: OwnTickets,
        upstream_id: str,
        tokenizer_digest: bytes,
        *,
        each: int,
        tls: Tls | None = None,
    ) -> None:
        """`addresses`: of all drafters now. `each`: drafters of a session."""
        self._addresses = addresses
        self._tickets = tickets
        self._upstream_id = upstream_id
        self._tokenizer_digest = tokenizer_digest
        self._each = each
        self._tls = tls
        self._links: list[DrafterLink] = []
        self._renewed: dict[str, float] = {}  # when a session's tickets were given out
        self._wanted = asyncio.Event()

    @property
    def usable(self) -> int:
        """Drafters that answer and may draft."""
        return sum(link.described is not None for link in self._links)

    @property
    def described(self) -> list[wire.DrafterDescription]:
        """What these say of themselves."""
        return [link.described for link in tuple(self._links) if link.described is not None]

    @property
    def misfits(self) -> list[tuple[str, str]]:
        """The addresses of the others, and why they do not."""
        return [(link.address, link.said) for link in tuple(self._links) if link.described is None]

    def wake(self) -> None:
        """Have sessions without drafters attached now."""
        self._wanted.set()

    async def run(self, address: str, sessions: Mapping[str, ForeignSession]) -> None:
        """Attach drafters while the sessions come and go, and detach those of sessions that have ended.

        `address`: this upstream's, for drafters. Run until cancelled.
        """
        loop, looked = asyncio.get_running_loop(), -LOOK_S
        try:
            while True:
                self._wanted.clear()
                if loop.time() - looked >= LOOK_S:
                    await self._look()
                    looked = loop.time()
                await self._detach_ended(sessions)
                await asyncio.gather(*(self._attach(it, address, loop.time()) for it in [*sessions.values()]))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wanted.wait()
        finally:
            await asyncio.gather(*(link.channel.close(None) for link in self._links))

    async def _look(self) -> None:
        """Follow the list of drafters, and ask each what it is."""
        there = {*await self._addresses()}
        for link in [link for link in self._links if link.address not in there]:
            self._links.remove(link)
            await link.channel.close(None)
        for it in there - {link.address for link in self._links}:
            self._links.append(DrafterLink(it, open_channel(it, self._tls, DRAFTER if self._tls else "")))
        await asyncio.gather(*(link.look(self._tokenizer_digest) for link in self._links))

    async def _attach(self, session: ForeignSession, address: str, now: float) -> None:
        """Attach drafters to a session that has too few, and give its own ones new tickets in time."""
        own = [link for link in self._links if session.id in link.attached]
        for link in own:
            if link.described is None:
                link.attached.discard(session.id)
        if now - self._renewed.setdefault(session.id, now) >= RENEW_S or len(session.subscriptions) < len(own):
            self._renewed[session.id] = now
            for link in own:
                await self._ask(link, session, address)
        others = [link for link in self._links if session.id not in link.attached and link.free > 0]
        others.sort(key=lambda link: -link.free)
        for link in others[: max(0, self._each - len(own))]:
            await self._ask(link, session, address)

    async def _ask(self, link: DrafterLink, session: ForeignSession, address: str) -> None:
        if link.described is None:
            return
        permit = Permit(session.id, OWN_TENANT, link.described.worker_id, self._upstream_id, EPOCH)
        request = wire.AttachRequest(
            session_id=session.id, epoch=EPOCH, upstream=address, ticket=self._tickets.sign(permit), tenant=OWN_TENANT
        )
        link.attached.add(session.id)  # also where no answer comes: the drafter may have taken it, and is told its end
        try:
            await link.stub.Attach(request, timeout=CALL_S, metadata=session.trace)
        except grpc.aio.AioRpcError as error:
            if error.code() not in UNCERTAIN:
                link.attached.discard(session.id)
            log.debug("drafter %s does not draft: %s", link.address, error.details())

    async def _detach_ended(self, sessions: Mapping[str, ForeignSession]) -> None:
        for name in self._renewed.keys() - sessions.keys():
            del self._renewed[name]
        ended = [(link, name) for link in self._links for name in link.attached - sessions.keys()]
        await asyncio.gather(*(self._detach(link, name) for link, name in ended))

    async def _detach(self, link: DrafterLink, name: str) -> None:
        link.attached.discard(name)
        with suppress(grpc.aio.AioRpcError):  # a drafter that is gone drafts no more
            await link.stub.Detach(wire.DetachRequest(session_id=name, epoch=EPOCH), timeout=CALL_S)
            if link.described is not None:
                link.described.sessions = max(0, link.described.sessions - 1)
