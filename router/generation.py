"""One generation, from a checked request to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.config import RouterConfig
from outrider.core.digest import EMPTY, extend
from outrider.errors import Cancelled, DeadlineExceeded, OutriderError, Overloaded, TokenizerMismatch, Unavailable
from outrider.store.registry import Worker
from outrider.store.sessions import OwnedSession, SessionRecord, Sessions
from router.answer import Answer, Part
from router.background import Background
from router.decoding import Commit, DecodeStream, Start
from router.drafting import Drafters, Post
from router.fleet import Fleet
from router.requests import Ask, check_fits, empty_prompt
from router.text import AnswerText, Detokenizer
from router.usage import Figures

_DEADLINE_SLACK_S = 0.05  # gRPC may cancel a call this much before its deadline by our clock


class Reason(Enum):
    """Why a generation ended; the values stand in the log."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    DISCONNECTED = "disconnected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Started:
    """The generation has been placed."""

    session_id: str
    model: str
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation has ended."""

    reason: Reason
    prompt_tokens: int
    figures: Figures


Event = Started | Part | Finished
Emit = Callable[[Event], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What generations share."""

    router_id: str
    config: RouterConfig
    fleet: Fleet
    sessions: Sessions
    background: Background


class Generation:
    """One session's only generation. `run` it once; `cancel` may come at any time.

    `deadline` is absolute, in seconds since 1970. `ended` is set when `run` has returned or raised.
    """

    def __init__(self, cluster: Cluster, ask: Ask, deadline: float | None) -> None:
        self.session_id = secrets.token_hex(16)
        self._cluster = cluster
        self._ask = ask
        self._deadline = deadline
        self._figures = Figures()
        self._plan = ask.policy.plan()
        self._stream: DecodeStream | None = None
        self._cancelled = False
        self.ended = asyncio.Event()

    async def run(self, emit: Emit) -> None:
        """Emits Started, the answer's parts, and Finished; raises what went wrong. Leaves nothing running.

        A part is emitted once its tokens are durable.
        """
        try:
            prompt, verifiers = await self._prepare()
            owned = await self._register(prompt, verifiers[0])
            try:
                reason = await self._decode(owned, prompt, verifiers, emit)
                await owned.finish(reason.value)
            except BaseException as error:
                self._cluster.background.spawn(owned.finish(self._why(error).value))
                raise
            await emit(Finished(reason, len(prompt), self._figures))
        finally:
            self.ended.set()

    async def cancel(self) -> None:
        """Ends the generation: no new step is started for it, and `run` finishes. Returns when it has."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()
        await self.ended.wait()

    async def _prepare(self) -> tuple[tuple[int, ...], list[Worker]]:
        """The prompt's tokens, and the verifiers that can answer it, best choice first."""
        model, prompt = self._ask.model, self._ask.prompt
        tokens = await model.encode(prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise empty_prompt()
        verifiers = await self._cluster.fleet.verifiers(model.name)
        if not verifiers:
            raise Unavailable(f"no verifier serves model {model.name!r} right now; start one, or try again")
        matching = [worker for worker in verifiers if worker.tokenizer_digest == model.digest]
        if not matching:
            raise TokenizerMismatch(
                f"the router's tokenizer for model {model.name!r} is not its verifiers' own; "
                "give the router the tokenizer.json of their checkpoint"
            )
        return tokens, check_fits(tokens, self._ask.contract, matching)

    async def _register(self, prompt: tuple[int, ...], verifier: Worker) -> OwnedSession:
        """Makes the session ours and its prompt durable."""
        record = SessionRecord(
            session_id=self.session_id,
            tenant="",
            model=self._ask.model.name,
            tokenizer_digest=self._ask.model.digest,
            contract=self._ask.contract,
            answer_position=len(prompt),
            plan=self._plan,
            verifier=verifier.worker_id,
            drafters=(),
            deadline=self._deadline,
        )
        await self._cluster.sessions.create(record)
        owner = f"{self._cluster.router_id}/{secrets.token_hex(4)}"
        owned = await self._cluster.sessions.acquire(self.session_id, 0, owner)
        await owned.append(0, prompt, extend(EMPTY, prompt))
        return owned

    async def _decode(
        self, owned: OwnedSession, prompt: tuple[int, ...], verifiers: Sequence[Worker], emit: Emit
    ) -> Reason:
        """The answer, from a verifier's first token to the reason that it ended for."""
        detokenizer = Detokenizer(self._ask.model.tokenizer, prompt, silent=self._ask.contract.stop_ids)
        answer = Answer(prompt, AnswerText(detokenizer, self._ask.stops), self._figures)
        try:
            stream = await self._place(owned, prompt, verifiers)
            drafters = self._draft(owned, stream)
            try:
                await emit(Started(self.session_id, self._ask.model.name, self._ask.contract.seed, len(prompt)))
                return await self._follow(owned, stream, drafters, answer, emit)
            finally:
                stream.cancel()
                self._cluster.fleet.release(stream.worker)
                drafters.dismiss()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled or (task and task.cancelling()):
                raise
            # It was not us who were cancelled but the stream, by `cancel`.
            await self._emit_rest(answer, emit)
            return Reason.CANCELLED

    async def _place(self, owned: OwnedSession, prompt: tuple[int, ...], verifiers: Sequence[Worker]) -> DecodeStream:
        """The session's place on the first verifier that has one. The caller gives it back to the fleet."""
        fleet = self._cluster.fleet
        refusal: OutriderError | None = None
        for worker in verifiers:
            fleet.take(worker)
            self._stream = stream = DecodeStream(worker, fleet.channel(worker), self._start(owned, prompt))
            if self._cancelled:
                stream.cancel()
            try:
                await stream.open()
            except BaseException as error:
                stream.cancel()
                fleet.release(worker)
                if not isinstance(error, Unavailable | Overloaded):
                    raise
                if isinstance(error, Unavailable):
                    fleet.suspect(worker)
                refusal = error
            else:
                return stream
        assert refusal is not None  # there is at least one verifier
        raise refusal

    def _start(self, owned: OwnedSession, prompt: tuple[int, ...]) -> Start:
        return Start(
            session_id=self.session_id,
            epoch=owned.epoch,
            model=self._ask.model.name,
            tokenizer_digest=self._ask.model.digest,
            tokens=prompt,
            digest=extend(EMPTY, prompt),
            answer_position=len(prompt),
            contract=self._ask.contract,
            plan=self._plan,
            window=self._cluster.config.window,
            timeout_s=None if self._deadline is None else max(0.0, self._deadline - time.time()),
        )

    def _draft(self, owned: OwnedSession, stream: DecodeStream) -> Drafters:
        wanted = self._cluster.config.drafters_per_session if self._plan.depth else 0
        post = Post(self.session_id, owned.epoch, stream.worker.address, self._ask.model.digest)
        return Drafters(self._cluster.fleet, self._cluster.background, post, wanted)

    async def _follow(
        self, owned: OwnedSession, stream: DecodeStream, drafters: Drafters, answer: Answer, emit: Emit
    ) -> Reason:
        """Every commit: log it, acknowledge it, pass it on, learn from it."""
        recorded_plan, recorded_drafters = self._plan, drafters.names
        while isinstance(commit := await stream.next(), Commit):
            part = answer.take(commit)
            await owned.append(
                part.position,
                part.tokens,
                answer.digest,
                plan=None if self._plan is recorded_plan else self._plan,
                drafters=None if drafters.names == recorded_drafters else drafters.names,
                verifier=stream.worker.worker_id,
            )
            recorded_plan, recorded_drafters = self._plan, drafters.names
            await stream.durable(answer.position)
            await emit(part)
            if part.stopped:
                return Reason.STOP
            drafters.observe(commit.report.drafters)
            self._ask.policy.observe(commit.report)
            plan = self._ask.policy.plan()
            if plan is not self._plan:
                self._plan = plan
                await stream.plan(plan)
        await self._emit_rest(answer, emit)
        return Reason.STOP if commit.stopped else Reason.LENGTH

    async def _emit_rest(self, answer: Answer, emit: Emit) -> None:
        rest = answer.rest()
        if rest.text:
            await emit(rest)

    def _why(self, error: BaseException) -> Reason:
        if isinstance(error, DeadlineExceeded):
            return Reason.DEADLINE
        if isinstance(error, asyncio.CancelledError | Cancelled):
            passed = self._deadline is not None and time.time() >= self._deadline - _DEADLINE_SLACK_S
            return Reason.DEADLINE if passed else Reason.DISCONNECTED
        return Reason.FAILED
