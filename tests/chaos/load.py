"""Sessions that run all the time, each with its own prompt; what became of them, and when."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tokenizers import Tokenizer

import outrider
from outrider.cli.verification.compare import TOLERANCE, Verdict, difference
from outrider.errors import OutriderError, Unavailable
from tests.chaos.servers import LOOK_S, Servers
from tests.e2e.conftest import MODELS, ROOT

CONTEXT = 512  # tokens of prompt and answer together
PROMPTS = range(32, 257)  # tokens
HEATS = (0.0, 0.8, 1.0)
TIMEOUT_S = 180.0  # of one answer, which takes a small part of it
AGAIN_S = 0.5  # after a refusal
NEAR_TIE = TOLERANCE["float32"]


@dataclass(frozen=True, slots=True)
class Case:
    """What one session generates, again and again."""

    number: int
    prompt: tuple[int, ...]
    temperature: float
    max_tokens: int


def cases(count: int, context: int = CONTEXT) -> list[Case]:
    """Held-out prompts, cut to seeded lengths, whose answers fill the context."""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    lines = (ROOT / "examples" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    rng = random.Random(count)
    made = []
    for number in range(count):
        prompt = texts[number % len(texts)][: min(rng.choice(PROMPTS), context // 2)]
        made.append(Case(number, tuple(prompt), HEATS[number % len(HEATS)], context - len(prompt)))
    return made


@dataclass
class Received:
    """What a client got of one answer."""

    case: Case
    session_id: str = ""
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of chunks, monotonic
    ended: float | None = None
    left: bool = False  # the client went away
    error: OutriderError | None = None
    repeated: int = 0  # tokens at a position that had come before
    skipped: int = 0  # positions that were passed over

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return bool(self.session_id) and self.ended is None

    def take(self, chunk: outrider.Chunk) -> None:
        """Another chunk, checked by its position, whatever the SDK has checked."""
        position = chunk.next_position - len(chunk.token_ids) - len(self.case.prompt)
        self.repeated += max(0, len(self.tokens) - position)
        self.skipped += max(0, position - len(self.tokens))
        self.tokens += chunk.token_ids
        gaps = list(chunk.gaps)
        self.gaps += gaps + [float("nan")] * (len(chunk.token_ids) - len(gaps))
        self.times.append(time.monotonic())


@dataclass
class Tally:
    """How answers compare with the undisturbed ones."""

    answers: int = 0
    tokens: int = 0
    cancelled: int = 0
    lost: int = 0
    repeated: int = 0  # or in another order
    changed: int = 0  # answers that part where no rounding can explain it
    near_ties: int = 0
    resumes: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        """Whether the answers show anything that must not happen."""
        return bool(self.lost or self.repeated or self.changed or self.errors)

    def judge(self, received: Received, whole: Received) -> None:
        """Adds one answer; `whole` is its undisturbed one."""
        self.answers += 1
        self.tokens += len(received.tokens)
        self.cancelled += received.left
        self.repeated += received.repeated
        self.lost += received.skipped
        if received.error is not None:
            self.errors.append(f"{type(received.error).__name__}: {received.error}")
        parted = difference(whole.tokens[: len(received.tokens)], received.tokens, whole.gaps, received.gaps)
        if parted is not None:
            near = parted.judged(NEAR_TIE) is Verdict.NEAR_TIE
            self.near_ties += near
            self.changed += not near
        if not received.left:
            self.lost += max(0, len(whole.tokens) - len(received.tokens))


class Load:
    """Clients of all routers, and a session for each case. `whole` are the undisturbed answers."""

    def __init__(
        self, servers: Servers, asked: Sequence[Case], seed: int, leaving: float = 0.0, tally: Tally | None = None
    ) -> None:
        """`leaving`: the share of answers that their client leaves or cancels on the way."""
        self.tally = tally or Tally()
        self.received: list[Received] = []  # all, while the load runs
        self.whole: dict[int, Received] = {}
        self.received_tokens = 0  # tokens
        self._servers = servers
        self._asked = asked
        self._rng = {case.number: random.Random(f"{seed}/{case.number}") for case in asked}
        self._leaving = leaving
        self._clients: list[outrider.AsyncClient] = []
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    async def __aenter__(self) -> Load:
        for first in range(len(self._servers.of("router"))):
            client = outrider.AsyncClient(self._servers.address(first))
            self._clients.append(await self._stack.enter_async_context(client))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    @property
    def running(self) -> list[Received]:
        """The answers that have begun and not ended."""
        return [received for received in self.received if received.running]

    async def undisturbed(self) -> None:
        """What each session generates while nothing happens, without speculation: one run of all."""
        for received in await asyncio.gather(*(self._answer(case, plain=True) for case in self._asked)):
            if received.error is not None:
                raise received.error
            self.whole[received.case.number] = received
        self.received.clear()

    def begin(self) -> None:
        """From now on all run, each anew when it has ended."""
        self._tasks = [asyncio.create_task(self._again(case)) for case in self._asked]

    async def end(self) -> None:
        """Waits for what runs; nothing is begun any more. Then all has been judged."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def more(self, tokens: int, within_s: float) -> None:
        """Waits until all sessions together have received `tokens` more tokens, or until `within_s` has passed."""
        until, give_up = self.received_tokens + tokens, time.monotonic() + within_s
        while self.received_tokens < until and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_S)

    async def _again(self, case: Case) -> None:
        """A session for each answer, closed behind it."""
        while not self._over:
            received = await self._answer(case)
            self.tally.judge(received, self.whole[case.number])
            if received.session_id:
                await self._close(case, received.session_id)

    async def _close(self, case: Case, session_id: str) -> None:
        """Closes a session. While Redis is away that is refused, and asked again."""
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return await self._client(case).close_session(session_id, timeout=TIMEOUT_S)
            except Unavailable as error:
                if "Redis" not in str(error) or time.monotonic() > give_up:
                    self.tally.errors.append(f"{type(error).__name__}: {error}")
                    return None
            await asyncio.sleep(AGAIN_S)

    def _client(self, case: Case) -> outrider.AsyncClient:
        return self._clients[case.number % len(self._clients)]

    async def _answer(self, case: Case, *, plain: bool = False) -> Received:
        received = Received(case)
        self.received.append(received)
        rng = self._rng[case.number]
        leaves = not plain and rng.random() < self._leaving
        until = rng.randrange(1, case.max_tokens) if leaves else case.max_tokens + 1
        client = self._client(case)
        stream = client.stream(
            case.prompt,
            temperature=case.temperature,
            seed=case.number,
            max_tokens=case.max_tokens,
            ignore_eos=True,
            speculation="off" if plain else None,
            timeout=TIMEOUT_S,
        )
        try:
            async with stream:
                async for chunk in stream:
                    received.session_id = received.session_id or stream.session_id
                    received.take(chunk)
                    self.received_tokens += len(chunk.token_ids)
                    if len(received.tokens) >= until:
                        received.left = True
                        if until % 2:
                            await client.cancel(stream.session_id)
                        break
                else:
                    self.tally.resumes += stream.result.resumes
        except OutriderError as error:
            received.error = error
        received.ended = time.monotonic()
        return received


def commonest(errors: Sequence[str], most: int = 5) -> list[str]:
    """Each different error once, with how often it came."""
    return [f"{count} x {error}" for error, count in Counter(errors).most_common(most)]
