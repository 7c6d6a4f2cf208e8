"""Threads that torch computes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Threads:
    """The number of threads that an engine computes on, from whichever thread it is called.

    OpenMP counts threads for each calling thread, and oneDNN asks it before torch has set it there.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._prepared = threading.local()

    def prepare(self) -> None:
        """Sets it for the calling thread, the first time."""
        if not hasattr(self._prepared, "done"):
            import torch

            torch.set_num_threads(self.count)
            self._prepared.done = True


def briefly(work: Callable[[], ResultT]) -> ResultT:
    """Does work in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed. When all teams are larger than the machine,
    GNU's lets no thread spin any more, and each of a pass's hundred operations waits for one to be woken: twice the
    time. So only the thread that runs the passes may keep a team.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
