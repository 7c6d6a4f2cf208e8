"""A drafter's streams to its upstreams: one each, opened for the first session and closed after long idleness."""

from __future__ import annotations

import asyncio

from drafter_svc.upstreams.upstream import Attachment, Listener, Route, Upstream
from outrider.core.tree.delta import Delta
from outrider.rpc.tls import Tls
from outrider.wire import drafter as wire
from outrider.wire.drafter import NO_FEATURES, WantedFeatures

IDLE_S = 60.0  # how long the stream to an upstream stays open with no session on it


class UpstreamPool:
    """All upstreams of a drafter, by address."""

    def __init__(self, hello: wire.Hello, tls: Tls | None = None, features: WantedFeatures = NO_FEATURES) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self.refused = 0  # frames of upstreams that were not acceptable
        self.hello = hello
        self.tls = tls
        self._features = features
        self._listener: Listener
        self._closing: set[asyncio.Task[None]] = set()  # idle streams that are being closed

    def serve(self, listener: Listener) -> None:
        """Has `listener` receive what upstreams send. Called once, before the first session is attached."""
        self._listener = listener

    @property
    def attached(self) -> int:
        """Sessions that are drafted for."""
        return sum(len(upstream.attachments) for upstream in self.upstreams.values())

    @property
    def refusals(self) -> list[str]:
        """Why upstreams refuse this drafter, each with its address."""
        return [
            f"{upstream.address}: {why}"
            for upstream in self.upstreams.values()
            if (why := upstream.refusals.reason(attached=bool(upstream.attachments)))
        ]

    def find(self, session_id: str) -> tuple[Upstream, Attachment] | None:
        """Return where a session is attached, or None."""
        for upstream in self.upstreams.values():
            if attachment := upstream.attachments.get(session_id):
                return upstream, attachment
        return None

    def upstream(self, address: str, route: Route | None = None) -> Upstream:
        """Return the stream to an upstream, or to the tunnel that leads there, or by a `route`. End other streams that
        were idle for long. Do not await: nothing may change between a look at the attachments and a new attachment.
        """
        others = [upstream for upstream in self.upstreams.values() if upstream.address != address]
        for idle in [upstream for upstream in others if upstream.idle_s > IDLE_S]:
            del self.upstreams[idle.address]
            closing = asyncio.create_task(idle.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if address not in self.upstreams:
            self.upstreams[address] = Upstream(
                address, self.hello, self._listener, self._count_refusal, self.tls, self._features, route
            )
        return self.upstreams[address]

    def make_room(self, address: str) -> bool:
        """Give up the latest session of the engine that has the most, for one that has at least two fewer.

        Only engines that attach their sessions themselves share in this way; a router shares among its own.
        """
        asking = self.upstreams.get(address)
        most = max(self.upstreams.values(), key=lambda each: len(each.own), default=None)
        if most is None or len(most.own) < (0 if asking is None else len(asking.own)) + 2:
            return False
        self.detach(most, most.own[-1])
        return True

    def detach(self, upstream: Upstream, attachment: Attachment) -> None:
        """Stop drafting for a session."""
        upstream.detach(attachment)
        self._listener.closed(attachment)

    def detach_all(self) -> None:
        """Stop drafting for every session."""
        for upstream in self.upstreams.values():
            for attachment in [*upstream.attachments.values()]:
                self.detach(upstream, attachment)

    def send(self, attachment: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """Send new nodes of a session to its upstream."""
        if found := self.find(attachment.session_id):
            found[0].send(attachment, delta, plan_version, exhausted)

    def resync(self, attachment: Attachment) -> None:
        """Request a snapshot for a session whose mirror drifted."""
        if found := self.find(attachment.session_id):
            self.refused += 1
            found[0].resubscribe(
                attachment, "this drafter's copy of the session differed from the upstream's too often"
            )

    async def close(self) -> None:
        """End all streams."""
        for upstream in self.upstreams.values():
            await upstream.close()
        await asyncio.gather(*self._closing)

    def _count_refusal(self) -> None:
        self.refused += 1
