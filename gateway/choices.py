"""Several answers of one request at once, and their parts in the order in which they come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from outrider.client import AsyncClient, AsyncStream, Chunk, Generation, Options
from outrider.errors import InvalidRequest

Prompt = str | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Heard:
    """A part of one choice, or its end."""

    index: int
    chunk: Chunk | None = None
    ended: Generation | None = None


def streams(
    client: AsyncClient, prompts: Sequence[Prompt], n: int, options: Options, timeout_s: float
) -> list[list[AsyncStream]]:
    """For each prompt its choices, which share a seed; none has begun. Raises InvalidRequest for what is for one."""
    count = n * len(prompts)
    for name in ("session", "idempotency_key"):
        if name in options and count > 1:
            raise InvalidRequest(name, f"is for one answer, and {count} are asked for; ask for them one by one")
    seed = options.get("seed")
    asked: Options = {**options, "seed": secrets.randbits(64) if seed is None else seed}

    def stream(prompt: Prompt, choice: int) -> AsyncStream:
        own: Options = {**asked, "choice": choice}
        return client.stream(prompt, timeout=timeout_s, **own)

    return [[stream(prompt, choice) for choice in range(n)] for prompt in prompts]


async def heard(groups: Sequence[Sequence[AsyncStream]]) -> AsyncGenerator[Heard, None]:
    """All of them, until all have ended. The choices of a prompt begin when its first one has, which has it read once.

    When one fails, or whoever iterates leaves, all are cancelled on the server.
    """
    queue: asyncio.Queue[Heard | BaseException] = asyncio.Queue(maxsize=16)  # a slow reader slows them down
    index = 0
    tasks = []
    for group in groups:
        read = asyncio.Event()
        for choice, stream in enumerate(group):
            tasks.append(asyncio.create_task(_follow(stream, index, read, waits=choice > 0, queue=queue)))
            index += 1
    left = len(tasks)
    try:
        while left:
            news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            left -= news.ended is not None
            yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    stream: AsyncStream, index: int, read: asyncio.Event, *, waits: bool, queue: asyncio.Queue[Heard | BaseException]
) -> None:
    try:
        if waits:
            await read.wait()
        async with stream:
            async for chunk in stream:
                read.set()
                await queue.put(Heard(index, chunk))
        read.set()
        await queue.put(Heard(index, ended=stream.result))
    except Exception as error:
        await queue.put(error)
