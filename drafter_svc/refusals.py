"""What an upstream answered instead of serving a drafter, kept for the routers: their next Attach is told."""

from __future__ import annotations

from collections import OrderedDict

from outrider.core.speculation import shown
from outrider.errors import Cancelled, DeadlineExceeded, InternalError, OutriderError, Unavailable
from outrider.v1 import drafter_pb2 as pb

MOST_SESSIONS = 256  # whose refusals are kept; the oldest is forgotten
LET_GO = "the upstream has let it go"  # a tier ends a session with this when its own upstream has ended it
REGULAR = ("finished", "fenced", LET_GO)  # how reasons begin for which sessions end in order
WITHOUT = "features:"  # how a reason begins for which nothing can be drafted at an upstream

Key = tuple[str, int]  # a session and its epoch


class Refusals:
    """Those of one upstream. Reasons are cut, and their number is bounded."""

    def __init__(self) -> None:
        self._refused = ""  # why the upstream serves no session at all
        self._unreachable = ""
        self._sessions: OrderedDict[Key, str] = OrderedDict()

    def closed(self, key: Key, reason: str) -> None:
        """The upstream ended an attachment."""
        if reason.startswith(REGULAR):
            return
        if reason.startswith(WITHOUT):
            self._refused = shown(reason)
        self._sessions[key] = shown(reason)
        self._sessions.move_to_end(key)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def failed(self, error: OutriderError) -> None:
        """The stream has ended with this error. gRPC makes an internal one of every end that meets a write, and hides
        what the upstream answered: then what was known before stays."""
        if isinstance(error, InternalError) and self._refused:
            return
        if isinstance(error, Unavailable | DeadlineExceeded | Cancelled | InternalError):
            self._refused, self._unreachable = "", shown(str(error))
        else:
            self._refused, self._unreachable = shown(str(error)), ""

    def welcomed(self) -> None:
        """The upstream has taken the stream."""
        self._refused = self._unreachable = ""

    def opened(self, key: Key) -> None:
        """A session's snapshot has come."""
        self._refused = ""
        self._sessions.pop(key, None)

    def forget(self, key: Key) -> None:
        """The upstream is asked for the session again, and a router was told what it answered before."""
        self._sessions.pop(key, None)

    def standing(self, *, attached: bool) -> str:
        """Why the upstream serves no session; empty: nothing speaks against it. `attached`: whether sessions are
        drafted for it; nobody tries to reach it for none."""
        return self._refused or (self._unreachable if attached else "")

    def answer(self, key: Key) -> pb.AttachResponse:
        """What a router is told that asks for this session."""
        return pb.AttachResponse(refused=self._sessions.get(key) or self._refused, unreachable=self._unreachable)
