"""What an upstream has sent of a session while its drafter is busy."""

from __future__ import annotations

from collections import deque

from drafter_svc.replica import Snapshot, Update
from outrider.core.tree import Hints

MOST_NEWS = 1024  # of a session that wait; a pass of a second sees a hundred


class News(deque[Snapshot | Update | Hints]):
    """Waits in order, and has a bound."""

    def add(self, latest: Snapshot | Update | Hints) -> bool:
        """Queues it. False, and all is forgotten, where more would wait than may: the session needs a snapshot."""
        if len(self) >= MOST_NEWS:
            self.clear()
            return False
        self.append(latest)
        return True
