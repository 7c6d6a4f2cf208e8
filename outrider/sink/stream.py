"""What waits to be sent on one drafter's stream: commits first, coalesced; then control frames, hints, snapshots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.tree import ALIAS_SPAN
from outrider.errors import Overloaded
from outrider.rpc.liveness import HEARTBEAT_S
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2

if TYPE_CHECKING:
    from outrider.sink.drafted import Subscription

CONTROL_FRAMES = 4096  # that may wait; a drafter that reads needs a handful

Parts = Iterator[pb.Snapshot]


@dataclass(slots=True)
class _Snapshot:
    """One that is wanted, and, once its first part is out, the rest of it."""

    begin: Callable[[], Parts]  # over the committed tokens of that moment
    rest: Parts | None = None


class DraftStream:
    """The sending side of a Draft call. Bounded, however slowly the drafter reads.

    A commit joins the one that still waits for the same attachment. An attachment that lags so far that late nodes
    could not be aliased any more is detached: its commits are forgotten and it gets a snapshot, made when it is
    sent. `heartbeat` says how the upstream goes; it is sent where there is nothing else to say.
    """

    def __init__(self, drafter_id: str, heartbeat: Callable[[], types_pb2.Heartbeat]) -> None:
        self.drafter_id = drafter_id
        self.subscriptions: dict[int, Subscription] = {}  # by attachment
        self.waiting: dict[int, pb.Subscribe] = {}  # likewise: those whose session is not there yet
        self.attached = 0  # the largest attachment so far
        self._heartbeat = heartbeat
        self._control: deque[pb.DraftDown] = deque()
        self._commits: dict[int, pb.Commit] = {}  # by attachment
        self._hints: dict[int, pb.Hints] = {}  # likewise
        self._snapshots: dict[int, _Snapshot] = {}
        self._held: set[int] = set()
        self._wake = asyncio.Event()
        self._ended = False
        self._finishing = False

    def say(self, frame: pb.DraftDown) -> None:
        """Queues a control frame."""
        self._control.append(frame)
        self._wake.set()

    def hold(self, attachment: int, held: bool) -> None:
        """Keeps back an attachment's commits until it is held no more."""
        if held:
            self._held.add(attachment)
        elif attachment in self._held:
            self._held.remove(attachment)
            self._wake.set()

    def commit(self, commit: pb.Commit) -> bool:
        """Queues a commit. False when the drafter lags too far: it needs a snapshot."""
        if commit.tokens:
            self._hints.pop(commit.attachment, None)  # they are under the root before
        snapshot = self._snapshots.get(commit.attachment)
        if snapshot is not None and snapshot.rest is None:
            return True  # the snapshot will hold it
        waiting = self._commits.get(commit.attachment)
        if waiting is None:
            self._commits[commit.attachment] = commit
        elif len(waiting.tokens) + len(commit.tokens) > ALIAS_SPAN:
            return False
        else:
            waiting.tokens.extend(commit.tokens)
            waiting.features += commit.features
            waiting.dropped.extend(commit.dropped)
            waiting.digest, waiting.credit = commit.digest, commit.credit
            waiting.price, waiting.time_price, waiting.ahead = commit.price, commit.time_price, commit.ahead
            if commit.HasField("plan"):
                waiting.plan.CopyFrom(commit.plan)
        if commit.attachment not in self._held:
            self._wake.set()
        return True

    def hint(self, hints: pb.Hints) -> None:
        """Queues hints in place of those that wait; they follow the snapshot, where one is due."""
        if hints.attachment not in self._held:
            self._hints[hints.attachment] = hints
            self._wake.set()

    def snapshot(self, attachment: int, begin: Callable[[], Parts]) -> None:
        """Sends all committed tokens, as they are when it is their turn, instead of what waits."""
        self._commits.pop(attachment, None)
        self._hints.pop(attachment, None)
        self._snapshots[attachment] = _Snapshot(begin)
        self._wake.set()

    def close(self, attachment: int, reason: str) -> None:
        """Tells the drafter that a session is over for it."""
        self.forget(attachment)
        self.say(pb.DraftDown(closed=pb.Closed(attachment=attachment, reason=reason)))

    def forget(self, attachment: int) -> None:
        """What waits for an attachment is not wanted any more; of its session nothing more is read."""
        for waiting in (self._commits, self._hints, self._snapshots):
            waiting.pop(attachment, None)
        self._held.discard(attachment)

    def end(self) -> None:
        """Nothing more is to be written."""
        self._ended = True
        self._wake.set()

    def finish(self) -> None:
        """Nothing more is to be written but what waits."""
        self._finishing = True
        self._wake.set()

    def check(self) -> None:
        """Raises Overloaded when the drafter has let too much pile up."""
        if len(self._control) > CONTROL_FRAMES:
            raise Overloaded(f"drafter {self.drafter_id} does not read what it is sent")

    async def next(self) -> pb.DraftDown | None:
        """The frame to write now; waits until there is one. None after the end."""
        silent_until = asyncio.get_running_loop().time() + HEARTBEAT_S
        while not self._ended:
            if frame := self._most_urgent():
                return frame
            if self._finishing:
                break
            self._wake.clear()
            try:
                async with asyncio.timeout_at(silent_until):
                    await self._wake.wait()
            except TimeoutError:
                return pb.DraftDown(heartbeat=self._heartbeat())
        return None

    def _most_urgent(self) -> pb.DraftDown | None:
        for attachment in self._commits:
            if attachment not in self._snapshots and attachment not in self._held:
                return pb.DraftDown(commit=self._commits.pop(attachment))
        if self._control:
            return self._control.popleft()
        for attachment in self._hints:
            if attachment not in self._snapshots:
                return pb.DraftDown(hints=self._hints.pop(attachment))
        for attachment, snapshot in self._snapshots.items():
            if snapshot.rest is None:
                snapshot.rest = snapshot.begin()
            part = next(snapshot.rest)
            if part.last:
                del self._snapshots[attachment]
            return pb.DraftDown(snapshot=part)
        return None
