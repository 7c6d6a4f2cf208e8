"""Queued messages of a session's upstream while the drafter is busy."""

from __future__ import annotations

from collections import deque

from drafter_svc.mirror import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Hints

MAX_QUEUED = 1024  # messages of a session that may be queued; about a hundred come in a second


class Inbox(deque[MirrorSnapshot | MirrorUpdate | Hints]):
    """A bounded queue of one session's messages, in order."""

    def add(self, message: MirrorSnapshot | MirrorUpdate | Hints) -> bool:
        """Queues a message. Returns False, and empties the queue, if it is full: the session needs a snapshot."""
        if len(self) >= MAX_QUEUED:
            self.clear()
            return False
        self.append(message)
        return True
