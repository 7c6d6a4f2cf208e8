"""Reasons for which an upstream refused to serve a drafter, kept for the routers' next Attach."""

from __future__ import annotations

from collections import OrderedDict

from outrider.core.session.speculation_status import printable
from outrider.errors import Cancelled, DeadlineExceeded, InternalError, OutriderError, Unavailable
from outrider.wire import drafter as wire

MAX_SESSIONS = 256  # sessions whose refusals are kept; the oldest is dropped
UPSTREAM_ENDED = "the upstream has let it go"  # a tier ends a session with this when its own upstream has ended it
ORDERLY_ENDS = ("finished", "fenced", UPSTREAM_ENDED)  # beginnings of reasons that are no refusals
FEATURES_REFUSED = "features:"  # beginning of a reason for which the upstream serves no session

Key = tuple[str, int]  # a session and its epoch


class Refusals:
    """The refusals of one upstream. Reasons are cut, and their number is bounded."""

    def __init__(self) -> None:
        self._refused = ""  # why the upstream serves no session at all
        self._unreachable = ""
        self._sessions: OrderedDict[Key, str] = OrderedDict()

    def closed(self, key: Key, reason: str) -> None:
        """Note that the upstream ended an attachment."""
        if reason.startswith(ORDERLY_ENDS):
            return
        if reason.startswith(FEATURES_REFUSED):
            self._refused = printable(reason)
        self._sessions[key] = printable(reason)
        self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def failed(self, error: OutriderError) -> None:
        """Note that the stream ended with this error. gRPC reports an internal error when a stream's end meets a
        write, and hides the upstream's status: then the known refusal stays.
        """
        if isinstance(error, InternalError) and self._refused:
            return
        if isinstance(error, Unavailable | DeadlineExceeded | Cancelled | InternalError):
            self._refused, self._unreachable = "", printable(str(error))
        else:
            self._refused, self._unreachable = printable(str(error)), ""

    def welcomed(self) -> None:
        """Clear the stream's refusals: the upstream has accepted the stream."""
        self._refused = self._unreachable = ""

    def opened(self, key: Key) -> None:
        """Clear the refusals of a session and of the stream: the session's snapshot was received."""
        self._refused = ""
        self._sessions.pop(key, None)

    def forget(self, key: Key) -> None:
        """Drop a session's refusal, which a router has received, because the session is subscribed again."""
        self._sessions.pop(key, None)

    def reason(self, *, attached: bool) -> str:
        """Return why the upstream serves no session; empty: it serves them. `attached`: whether sessions are attached;
        without any, the drafter does not try to reach the upstream.
        """
        return self._refused or (self._unreachable if attached else "")

    def attach_response(self, key: Key) -> wire.AttachResponse:
        """Return the answer to a router's Attach of this session."""
        return wire.AttachResponse(refused=self._sessions.get(key) or self._refused, unreachable=self._unreachable)
