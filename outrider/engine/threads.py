"""The threads that torch computes with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class TorchThreads:
    """Sets the number of threads that an engine computes with, in whichever thread the engine is called.

    OpenMP keeps this number for each calling thread, and oneDNN reads it before torch has set it in a new thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._prepared = threading.local()

    def prepare(self) -> None:
        """Set the number in the calling thread, at its first call."""
        if not hasattr(self._prepared, "done"):
            import torch

            torch.set_num_threads(self.count)
            self._prepared.done = True


def run_in_short_lived_thread(work: Callable[[], ResultT]) -> ResultT:
    """Return the result of `work`, which runs in a thread that ends afterwards.

    OpenMP keeps a team of threads for every thread that has ever computed. When the teams together have more threads
    than the machine has cores, GNU's OpenMP lets no thread spin any more, and each of a pass's hundred operations waits
    until a thread is woken, which doubles the time. So only the thread that runs the passes may keep a team.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
