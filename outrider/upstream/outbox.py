"""The frames queued for one drafter's stream: commits first, coalesced; then control frames, hints, snapshots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.core.tree.committed_window import ALIAS_SPAN
from outrider.errors import Overloaded
from outrider.rpc.liveness import HEARTBEAT_S
from outrider.wire import drafter as wire
from outrider.wire.drafter import sent_terms_of, set_sent_terms
from outrider.wire.message_bounds import MAX_TOGETHER

CONTROL_FRAMES = 4096  # most control frames that may be queued; a drafter that reads needs a handful
BATCH_BYTES = 2**20  # of commits in one message, from which on the rest waits for the next

Parts = Iterator[wire.Snapshot]


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that is due, and the rest of it once its first part was sent."""

    begin: Callable[[], Parts]  # makes the parts, over the tokens committed by then
    rest: Parts | None = None


class UpstreamOutbox:
    """The sending side of a Draft call. Its queues are bounded, however slowly the drafter reads.

    A commit joins the queued commit of the same attachment. An attachment that lags so far that late nodes could not be
    aliased any more gets a snapshot, made when it is sent, instead of its queued commits. `heartbeat` reports the
    upstream's progress; it is sent when nothing else is queued.
    """

    def __init__(self, drafter_id: str, heartbeat: Callable[[], wire.Heartbeat]) -> None:
        self.drafter_id = drafter_id
        self.batches = False  # whether the drafter takes several commits in one message
        self._heartbeat = heartbeat
        self._control: deque[wire.DraftDown] = deque()
        self._commits: dict[int, wire.Commit] = {}  # by attachment
        self._hints: dict[int, wire.Hints] = {}  # by attachment
        self._snapshots: dict[int, _Snapshot] = {}
        self._held: set[int] = set()
        self._wake = asyncio.Event()
        self._ended = False
        self._finishing = False

    def queue_control(self, frame: wire.DraftDown) -> None:
        """Queue a control frame."""
        self._control.append(frame)
        self._wake.set()

    def hold(self, attachment: int, held: bool) -> None:
        """Hold an attachment's commits back, or release them."""
        if held:
            self._held.add(attachment)
        elif attachment in self._held:
            self._held.remove(attachment)
            self._wake.set()

    def commit(self, commit: wire.Commit) -> bool:
        """Queue a commit. Return False when the drafter lags too far: it needs a snapshot."""
        if commit.tokens:
            self._hints.pop(commit.attachment, None)  # they belong to the previous root
        snapshot = self._snapshots.get(commit.attachment)
        if snapshot is not None and snapshot.rest is None:
            return True  # the snapshot will include it
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
            set_sent_terms(waiting, sent_terms_of(commit))
            if commit.HasField("plan"):
                waiting.plan.CopyFrom(commit.plan)
        if commit.attachment not in self._held:
            self._wake.set()
        return True

    def hint(self, hints: wire.Hints) -> None:
        """Queue hints in place of earlier ones; they follow the snapshot, if one is due."""
        if hints.attachment not in self._held:
            self._hints[hints.attachment] = hints
            self._wake.set()

    def snapshot(self, attachment: int, begin: Callable[[], Parts]) -> None:
        """Queue a snapshot in place of all that is queued for the attachment; `begin` makes it when it is sent."""
        self._commits.pop(attachment, None)
        self._hints.pop(attachment, None)
        self._snapshots[attachment] = _Snapshot(begin)
        self._wake.set()

    def close(self, attachment: int, reason: str) -> None:
        """Queue the end of an attachment: its session is over for the drafter."""
        self.forget(attachment)
        self.queue_control(wire.DraftDown(closed=wire.Closed(attachment=attachment, reason=reason)))

    def forget(self, attachment: int) -> None:
        """Drop all that is queued for an attachment; nothing more is read of its session."""
        for waiting in (self._commits, self._hints, self._snapshots):
            waiting.pop(attachment, None)
        self._held.discard(attachment)

    def end(self) -> None:
        """End the stream: no further frame is written."""
        self._ended = True
        self._wake.set()

    def finish(self) -> None:
        """End the stream once all queued frames are written."""
        self._finishing = True
        self._wake.set()

    def check(self) -> None:
        """Raise Overloaded when too many control frames are queued."""
        if len(self._control) > CONTROL_FRAMES:
            raise Overloaded(f"drafter {self.drafter_id} does not read what it is sent")

    async def next(self) -> wire.DraftDown | None:
        """Return the next frame to write; wait until there is one. None after the end."""
        silent_until = asyncio.get_running_loop().time() + HEARTBEAT_S
        while not self._ended:
            if frame := self.next_now():
                return frame
            if self._finishing:
                break
            self._wake.clear()
            try:
                async with asyncio.timeout_at(silent_until):
                    await self._wake.wait()
            except TimeoutError:
                return wire.DraftDown(heartbeat=self._heartbeat())
        return None

    def _next_commits(self) -> list[wire.Commit]:
        commits: list[wire.Commit] = []
        size, limit = 0, MAX_TOGETHER if self.batches else 1
        for attachment, commit in self._commits.items():
            if attachment not in self._snapshots and attachment not in self._held:
                commits.append(commit)
                size += commit.ByteSize()
                if len(commits) == limit or size > BATCH_BYTES:
                    break
        for commit in commits:
            del self._commits[commit.attachment]
        return commits

    def next_now(self) -> wire.DraftDown | None:
        """Return the next frame to write; None when nothing is queued."""
        if commits := self._next_commits():
            return wire.DraftDown(commits=commits) if len(commits) > 1 else wire.DraftDown(commit=commits[0])
        if self._control:
            return self._control.popleft()
        for attachment in self._hints:
            if attachment not in self._snapshots:
                return wire.DraftDown(hints=self._hints.pop(attachment))
        for attachment, snapshot in self._snapshots.items():
            if snapshot.rest is None:
                snapshot.rest = snapshot.begin()
            part = next(snapshot.rest)
            if part.last:
                del self._snapshots[attachment]
            return wire.DraftDown(snapshot=part)
        return None
