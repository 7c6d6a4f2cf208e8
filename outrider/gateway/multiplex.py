"""Runs the several answers of one request concurrently and merges their parts in order of arrival."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from outrider.client import AsyncClient, AsyncStream, Chunk, FinishReason, Generation, LogprobRows, Options
from outrider.core.answers.answer_reader import AnswerReader
from outrider.errors import InvalidRequest

Prompt = str | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class ReceivedPart:
    """A chunk of one choice, or its end."""

    index: int
    chunk: Chunk | None = None
    ended: Generation | None = None
    reader: Callable[[], AnswerReader] = AnswerReader  # makes what divides the choice's text
    cached_tokens: int = 0  # of a chunk: tokens of its prompt whose KV was cached
    prompt_token_ids: Sequence[int] = ()  # of a prompt's first choice, in its first part, if they are wanted


async def streams(
    client: AsyncClient, prompts: Sequence[Prompt], n: int, options: Options, timeout_s: float
) -> list[list[AsyncStream]]:
    """Return the streams of each prompt's choices, which share a seed. No stream has begun.

    Raises InvalidRequest for options that only a single answer can have.
    """
    count = n * len(prompts)
    for name in ("session", "idempotency_key"):
        if name in options and count > 1:
            raise InvalidRequest(
                name, f"applies to a single answer, but the request is for {count}; send a request for each"
            )
    seeded = options  # one answer's seed is drawn by the router, so that a repeated request is the same one
    if count > 1 and options.get("seed") is None:
        seeded = {**options, "seed": secrets.randbits(64)}
    # Equal requests with this key may wait for the answer, or come when the client has left. A session is wanted again.
    repeatable = options.get("idempotency_key") is not None and options.get("session") is None
    groups = []
    for prompt in prompts:
        first = client.stream(prompt, timeout=timeout_s, **seeded)
        first.keeps_answer = False  # what has to be kept `respond.answer` collects
        first.stays_resumable = repeatable
        groups.append([first, *(first.with_choice(choice) for choice in range(1, n))])
        await asyncio.sleep(0)  # a request may have megabytes: others have their turns in between
    return groups


WAITING = ReceivedPart(-1)  # no part has come for a while


async def merged(
    groups: Sequence[Sequence[AsyncStream]],
    pauses: tuple[float | None, float | None] = (None, None),
    *,
    answers: bool = True,
) -> AsyncGenerator[ReceivedPart, None]:
    """Yield the parts of all streams until all streams have ended, and WAITING whenever none has come for a while.

    `pauses`: seconds of that while, before the first part and later; None: WAITING is not yielded. `answers`: whether
    the answers are wanted, and not their prompts alone.

    The further choices of a prompt begin when its first choice has its first chunk, so that the prompt is read once.
    When a stream fails or the iteration is left, all streams are cancelled on the server.
    """
    queue: asyncio.Queue[ReceivedPart | BaseException] = asyncio.Queue(maxsize=16)  # bounded: a slow reader slows them
    index = 0
    tasks = []
    for group in groups:
        prompt_read = asyncio.Event()
        for choice, stream in enumerate(group):
            tasks.append(asyncio.create_task(_follow(stream, index, prompt_read, waits=choice > 0, queue=queue)))
            index += 1
    left, pause = len(tasks), pauses[0]
    try:
        while left:
            try:
                async with asyncio.timeout(pause):
                    part = await queue.get()
            except TimeoutError:
                part = WAITING
            pause = pauses[1]
            if isinstance(part, BaseException):
                raise part
            left -= part.ended is not None
            yield part if answers else _without_answer(part)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _without_answer(part: ReceivedPart) -> ReceivedPart:
    """Return a part of an answer of a single token without that token."""
    chunk, ended = part.chunk, part.ended
    if chunk is not None:
        begins = chunk.next_position - len(chunk.token_ids)
        chunk = replace(chunk, text="", token_ids=(), gaps=(), logprobs=LogprobRows(), next_position=begins)
    if ended is not None:
        usage = replace(ended.usage, completion_tokens=0)
        ended = replace(ended, finish_reason=FinishReason.LENGTH, usage=usage)
    return replace(part, chunk=chunk, ended=ended)


async def _follow(
    stream: AsyncStream,
    index: int,
    prompt_read: asyncio.Event,
    *,
    waits: bool,
    queue: asyncio.Queue[ReceivedPart | BaseException],
) -> None:
    try:
        if waits:
            await prompt_read.wait()
        begun = False
        async with stream:
            async for chunk in stream:
                if not chunk.prompt_logprobs:
                    prompt_read.set()
                await queue.put(
                    ReceivedPart(
                        index,
                        chunk,
                        reader=stream.reader,
                        cached_tokens=stream.cached_tokens,
                        prompt_token_ids=() if begun else stream.prompt_token_ids,
                    )
                )
                begun = True
        prompt_read.set()
        ids = () if begun else stream.prompt_token_ids
        await queue.put(ReceivedPart(index, ended=stream.result, prompt_token_ids=ids))
    except Exception as error:
        await queue.put(error)
