"""Runs work whose time grows with a text's length in a thread, where the text is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import ParamSpec, TypeVar

LONG = 2048  # tokens; work over this many takes a millisecond or two

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


async def offload_if_long(text: Sized, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs) -> ResultT:
    """Return the result of `work`, whose time grows with the length of `text`.

    A short text's work runs at once, a long one's in a thread. The event loop runs on meanwhile, a few milliseconds
    late at worst, so conditions that the caller checked before may have changed afterwards.
    """
    if len(text) <= LONG:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)
