"""Sends an adapter's files from rank 0 to the other ranks, in pieces beside the plans of passes.

Only rank 0's machine needs the files. One message takes one piece along, so that no pass waits for more. Another rank
writes the pieces to a temporary folder, and reads and packs its part, all in a thread of its own. It waits for that
thread when a plan first uses the adapter.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from outrider.engine.adapters.low_rank import FILES, AdapterFiles, AdapterLoader, LowRankAdapter
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.tensor_parallel.rank_messages import AdapterChange, AdapterPiece, DropAdapter
from outrider.errors import CheckpointError, Unavailable

PIECE = 2 << 20  # bytes of a message's piece
MOST_BYTES = 4 << 30  # of an adapter's files
TAKE_S = 60.0  # for a message to take the next piece along: heartbeats come every second, and passes are shorter
END_S = 10.0  # for a thread that packs an adapter to end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedAdapter:
    """An adapter on all ranks. It is dropped on all of them with the last reference to it."""

    number: int  # under which the other ranks have their parts
    part: object  # of rank 0
    sent_by: AdapterOutbox


class AdapterOutbox:
    """What rank 0 has to send to the other ranks about adapters. Any thread may call its methods."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = count()
        self._pieces: deque[AdapterPiece] = deque()
        self._taken = 0  # pieces so far
        self._ended = ""  # why no message will take a piece any more
        # Finalizers append to it at any time, also in a thread that holds the lock.
        self._dropped: deque[int] = deque()

    @property
    def pending(self) -> bool:
        """Whether pieces wait for a message."""
        return bool(self._pieces)

    def add(self, files: AdapterFiles) -> int:
        """Queue an adapter's files, and return its number.

        Raises CheckpointError for files that are too large, RankLost for a group that has ended.
        """
        if (size := sum(it.size for it in files.contents)) > MOST_BYTES:
            raise CheckpointError(
                f"{files.folder}: ranks that share a model exchange adapters of up to {MOST_BYTES} bytes, and this one "
                f"has {size}; train it with a smaller rank, or save it in bfloat16"
            )
        pieces = []
        number = next(self._numbers)
        for file, (_, content) in enumerate(files.contents):
            for start in range(0, len(content), PIECE):
                part = content[start : start + PIECE]
                pieces.append(AdapterPiece(number, file, part, last=False))
        pieces[-1] = replace(pieces[-1], last=True)
        with self._changed:
            self._check()
            self._pieces += pieces
        return number

    def wait(self, number: int, then_s: float) -> None:
        """Wait until an adapter has been sent, and for `then_s` seconds more.

        Raises RankLost for a group that has ended. Raises Unavailable where no message takes a piece along any more;
        the adapter is dropped then.
        """
        with self._changed:
            while any(it.number == number for it in self._pieces):
                before = self._taken
                if not self._changed.wait_for(lambda: self._ended or self._taken > before, TAKE_S):  # noqa: B023
                    self._pieces = deque(it for it in self._pieces if it.number != number)
                    self.drop(number)
                    raise Unavailable(
                        f"the ranks that share the model have run neither a pass nor a heartbeat for {TAKE_S:g} s, so "
                        "that the adapter could not be sent to them; load it again"
                    )
                self._check()
            self._changed.wait_for(lambda: self._ended, then_s)
            self._check()

    def drop(self, number: int) -> None:
        """Queue the end of an adapter."""
        self._dropped.append(number)

    def changes(self) -> list[AdapterChange]:
        """Return what the next message takes along: ends of adapters, and one piece. `sent` has to follow."""
        found: list[AdapterChange] = []
        with self._changed:
            while self._dropped:
                found.append(DropAdapter(self._dropped.popleft()))
            return [*found, self._pieces[0]] if self._pieces else found

    def sent(self, changes: Sequence[object]) -> None:
        """Take note that a message with these changes has been sent."""
        with self._changed:
            if changes and self._pieces and changes[-1] is self._pieces[0]:
                self._pieces.popleft()
                self._taken += 1
                self._changed.notify_all()

    def close(self, why: str) -> None:
        """Raise RankLost in all callers that wait, and in those that come later."""
        with self._changed:
            self._ended = self._ended or why
            self._pieces.clear()
            self._changed.notify_all()

    def _check(self) -> None:
        if self._ended:
            raise RankLost(self._ended)


class SharedAdapters(AdapterLoader):
    """Loads an adapter on all ranks, from the same bytes.

    `load` waits until passes and heartbeats, which run in another thread, have sent the files to the other ranks. It
    raises Unavailable where they send nothing for a minute, RankLost where the group ends meanwhile.
    """

    def __init__(self, own: AdapterLoader, outbox: AdapterOutbox, send_soon: Callable[[], None]) -> None:
        """`own`: of rank 0; `send_soon`: has messages follow one another while pieces wait."""
        self.most_bytes = own.most_bytes
        self._own = own
        self._outbox = outbox
        self._send_soon = send_soon

    def load(self, folder: Path) -> tuple[object, LowRankAdapter]:
        return super().load(folder) if self.most_bytes else self._own.load(folder)

    def pack(self, files: AdapterFiles) -> tuple[object, LowRankAdapter]:
        began = time.monotonic()
        part, read = self._own.pack(files)
        seconds = time.monotonic() - began
        number = self._outbox.add(files)
        self._send_soon()
        # The other ranks pack their parts in about the time that this one took. Otherwise the first pass with the
        # adapter, and all sessions in it, would wait for them.
        self._outbox.wait(number, then_s=seconds)
        adapter = SharedAdapter(number, part, self._outbox)
        weakref.finalize(adapter, self._outbox.drop, number).atexit = False
        return adapter, read


class AdapterInbox:
    """The adapters of a rank that is not rank 0. Only the thread of its passes calls it."""

    def __init__(self, engine: Engine, name: str) -> None:
        """`name`: of the rank, for errors."""
        self._engine = engine
        self._name = name
        self._incoming: dict[int, _IncomingAdapter] = {}  # by number

    def apply(self, change: AdapterChange) -> None:
        """Take a change over. Raises Unavailable where an adapter cannot be loaded here."""
        if isinstance(change, DropAdapter):
            dropped = self._incoming.pop(change.number, None)
            if dropped is not None:
                dropped.abandon()
            return
        incoming = self._incoming.get(change.number)
        if incoming is None:
            incoming = self._incoming[change.number] = _IncomingAdapter(self._engine, self._name)
            incoming.start()
        incoming.take(change)

    def check(self) -> None:
        """Raise Unavailable where an adapter could not be loaded here. Wait for none."""
        for it in self._incoming.values():
            it.check()

    def with_adapters(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return segments with this rank's adapters for their numbers. Wait for those that are still being packed.

        Raises Unavailable where one cannot be loaded here.
        """
        if all(it.adapter is None for it in segments):
            return segments
        return [it if it.adapter is None else replace(it, adapter=self._loaded(it.adapter)) for it in segments]

    def close(self) -> None:
        """Drop all adapters, and wait for the threads that pack them."""
        for it in self._incoming.values():
            it.abandon()
        for it in self._incoming.values():
            it.join(END_S)
        self._incoming.clear()

    def _loaded(self, number: object) -> object:
        assert isinstance(number, int)
        return self._incoming[number].result()


class _IncomingAdapter(threading.Thread):
    """Writes the pieces of one adapter to a temporary folder, and loads it from there."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(name="adapter", daemon=True)
        self._engine = engine
        self._rank = name
        self._pieces: SimpleQueue[AdapterPiece | None] = SimpleQueue()  # None: the adapter is dropped
        self._bytes = 0
        self._adapter: object = None
        self._failure = ""

    def take(self, piece: AdapterPiece) -> None:
        """Take the next piece over."""
        self._bytes += len(piece.content)
        if self._bytes > MOST_BYTES:
            raise Unavailable(f"{self._rank} has received more than {MOST_BYTES} bytes of an adapter")
        self._pieces.put(piece)

    def abandon(self) -> None:
        """End the thread where pieces are missing."""
        self._pieces.put(None)

    def result(self) -> object:
        """Wait for the adapter. Raises Unavailable where it cannot be loaded."""
        self.join()
        self.check()
        return self._adapter

    def check(self) -> None:
        """Raise Unavailable where the adapter could not be loaded."""
        if self._failure:
            raise Unavailable(
                f"{self._rank} cannot load an adapter that rank 0 could: {self._failure}; give each rank memory, and "
                "room in its folder for temporary files"
            )

    def run(self) -> None:
        """Receive and load."""
        try:
            with TemporaryDirectory(prefix="outrider-adapter-") as folder:
                if self._write(Path(folder)):
                    self._adapter, _ = self._engine.load_adapter(Path(folder))
        except Exception as error:  # whatever it is, `check` raises it in the thread of the passes
            self._failure = f"{type(error).__name__}: {error}"
            log.error("%s cannot load an adapter: %s", self._rank, self._failure)

    def _write(self, folder: Path) -> bool:
        """Write all pieces. Return False for an adapter that is dropped before."""
        while (piece := self._pieces.get()) is not None:
            with (folder / FILES[piece.file]).open("ab") as file:
                file.write(piece.content.tobytes())
            if piece.last:
                return True
        return False
