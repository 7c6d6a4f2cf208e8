"""Threads that torch computes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


def briefly(work: Callable[[], ResultT]) -> ResultT:
    """Does work in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed. When all teams are larger than the machine,
    GNU's lets no thread spin any more, and each of a pass's hundred operations waits for one to be woken: twice the
    time. So only the thread that runs the passes may keep a team.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
