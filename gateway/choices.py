"""Several answers of one request at once, and their parts in the order in which they come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from outrider.client import AsyncClient, AsyncStream, Chunk, Generation, Options

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
    """For each prompt its choices, which share a seed; none has begun."""
    seed = options.get("seed")
    asked: Options = {**options, "seed": secrets.randbits(64) if seed is None else seed}
    if n > 1 or len(prompts) > 1:  # these name one generation
        asked.pop("session", None)
        asked.pop("idempotency_key", None)

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
