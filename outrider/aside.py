"""Work in proportion to a text, kept off the event loop where the text is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import ParamSpec, TypeVar

LONG = 2048  # tokens; what is done with so many takes a millisecond or two

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


async def aside(text: Sized, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs) -> ResultT:
    """What `work` returns, which takes time in proportion to `text`: done at once for a short one, in a thread for a
    long one. The loop then goes on beside it, a few milliseconds late at worst, so what was checked before may have
    changed afterwards."""
    if len(text) <= LONG:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)
