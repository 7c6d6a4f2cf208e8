"""How this router becomes the owner of a generation that another call or router began: it reads the log, and raises the
epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.config import RouterConfig
from outrider.core.control.depth.policies import GammaPolicy, policy
from outrider.core.session.contract import Contract, FinishReason, Plan
from outrider.errors import Conflict, InvalidRequest, NotFound, Superseded, Unavailable
from outrider.limits.fair_turns import LoopTurns
from outrider.offload import offload_if_long
from outrider.store.sessions import SessionRecord, Sessions, SessionTurn
from router.background import BackgroundTasks
from router.counters.usage_stats import UsageStats
from router.drafters.warm_start import WarmStart
from router.requests.requests import ceilings
from router.requests.served_models import ServedModel
from router.sessions.context import SessionStore
from router.sessions.response import Response, ResponsePart, position_beyond_log, unsent_parts
from router.sessions.token_log import TokenLog
from router.text.detokenizer import AnswerText, Detokenizer

PolicyOf = Callable[[Plan, ServedModel, Contract], GammaPolicy]  # of a generation that began under a plan


class ClientPosition(NamedTuple):
    """What a client has of an answer: everything before these. 0 and 0: nothing."""

    position: int = 0  # of the next token
    text_offset: int = 0  # characters of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGeneration:
    """A generation to decode further, or, if it has ended already, to read."""

    model: ServedModel
    record: SessionRecord
    turn: SessionTurn
    token_log: TokenLog | None  # None: the generation has ended
    response: Response
    missing: Iterable[ResponsePart] = ()  # the durable parts that the client lacks
    client: ClientPosition
    policy: GammaPolicy
    forked_from: str = ""
    logged: int = 0  # tokens that were in the log before it began, where it began here
    deadline: float = math.inf  # by the monotonic clock
    read: Sequence[int] = ()  # the session's tokens, where the generation has ended
    returns_prompt: bool = False  # whether the client is sent the prompt's tokens

    @property
    def returned_prompt(self) -> Sequence[int]:
        """The prompt's tokens, if the client is sent them."""
        if not self.returns_prompt:
            return ()
        return (self.read if self.token_log is None else self.token_log.tokens)[: self.response.start]

    @property
    def ended(self) -> FinishReason | None:
        """Why the generation ended; None while it has not."""
        return FinishReason(self.record.finished) if self.record.finished else None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinity where there is none."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGeneration:
    """A generation that its client may resume: what its log held when it was read, and where the client stands."""

    model: ServedModel
    record: SessionRecord
    turn: SessionTurn
    response: Response  # with the log's tokens in it
    parts: list[ResponsePart]  # of the response
    tokens: list[int]  # all of the session's
    logprobs: bytearray  # of the response
    client: ClientPosition


class Takeovers:
    """Finds generations in the log for clients that resume them, and makes them this router's."""

    def __init__(
        self,
        *,
        store: SessionStore,
        models: Mapping[str, ServedModel],
        turns: LoopTurns,
        background: BackgroundTasks,
        policy: PolicyOf,
    ) -> None:
        """`turns`: at reading again from the log."""
        self._store = store
        self._models = models
        self._turns = turns
        self._background = background
        self._policy = policy

    async def take_over(
        self, tenant: str, session_id: str, generation: int, client: ClientPosition
    ) -> OpenedGeneration:
        """Take the latest generation of a tenant's session over from its owner, for a client that stands at `client`.

        Raises as `find` and `take`.
        """
        return await self.take(await self.find(tenant, session_id, generation, client))

    async def find(self, tenant: str, session_id: str, generation: int, client: ClientPosition) -> FoundGeneration:
        """Read the latest generation of a tenant's session from its log, for a client that stands at `client`. The
        owner is not disturbed.

        Raises NotFound when there is no generation or it was not resumed in time, InvalidRequest when `generation` is
        not the latest or the position is not in it, Conflict for a position beyond the log.
        """
        sessions, (next_position, text_offset) = self._store.sessions, client
        record = await open_record(sessions, tenant, session_id)
        turn = await self._resumable(record, generation)
        model = self._models.get(record.model)
        if model is None:
            raise NotFound(f"model {record.model!r} of session {session_id} is not served here")
        scores = turn.contract.prompt_logprobs is not None and not text_offset
        if 0 < next_position < turn.answer_position and not scores:
            begins = f"the answer begins at {turn.answer_position}, so a later generation has begun"
            raise InvalidRequest("next_position", f"is {next_position}, and {begins}")
        if next_position > record.length:
            raise position_beyond_log(next_position, record.length)
        log = await sessions.read(session_id)
        now = await sessions.get(session_id)  # the log may be newer than the record
        _check_same(record, now)
        if now.finished and len(log.tokens) != now.length:  # the generation ended since, so the log is final
            log = await sessions.read(session_id)
            _check_same(record, await sessions.get(session_id))
        prompt, output = log.tokens[: turn.answer_position], log.tokens[turn.answer_position :]
        if len(prompt) < turn.answer_position:
            raise Conflict(f"session {session_id}: its log is shorter than its prompt; Redis lost it")
        response = await offload_if_long(prompt, new_response, model, prompt, turn, UsageStats(now.usage))
        parts = await response.replay(output, log.logprobs, self._turns, tenant)
        if now.finished:
            parts.append(response.flush())
        if turn.contract.prompt_logprobs is None:
            next_position = max(next_position, response.start)
        response.scored = min(next_position, response.start)
        response.check_reached(next_position, text_offset)
        return FoundGeneration(
            model=model,
            record=now,
            turn=turn,
            response=response,
            parts=parts,
            tokens=[*log.tokens],
            logprobs=bytearray(log.logprobs),
            client=ClientPosition(next_position, text_offset),
        )

    async def take(self, found: FoundGeneration) -> OpenedGeneration:
        """Make a found generation this router's, unless it has ended.

        Raises InvalidRequest when a later generation has begun, NotFound when it was not resumed in time, Superseded
        when another call takes it over at the same time.
        """
        session_id, sessions = found.record.session_id, self._store.sessions
        record = found.record if found.record.finished else await sessions.get(session_id)
        _check_same(found.record, record)
        await self._resumable(record, record.generation)
        if record.finished and found.record.finished:
            return self._open(found, record, None)
        owned = await sessions.acquire(session_id, record.epoch, self._store.owner())
        try:
            record = await sessions.get(session_id)  # its owner may have ended it meanwhile
            if (record.epoch, record.owner) != (owned.epoch, owned.owner):
                raise Superseded(
                    f"session {session_id} belongs to {record.owner} since epoch {record.epoch}; do not retry"
                )
            log = await sessions.read(session_id, len(found.tokens))
            found.tokens.extend(log.tokens)
            found.logprobs.extend(log.logprobs)
            parts = await found.response.replay(log.tokens, log.logprobs, self._turns, record.tenant)
            found.parts.extend(parts)
            if record.length != len(found.tokens):
                raise Unavailable(f"session {session_id} changed while it was read; resume it")
            if record.finished:
                found.parts.append(found.response.flush())
                await owned.release(record.usage)
                return self._open(found, record, None)
            token_log = TokenLog(sessions, owned, record, found.tokens, bytes(found.logprobs))
            return self._open(found, record, token_log)
        except BaseException:
            self._background.spawn(owned.release(record.usage))  # for the next owner
            raise

    async def end(self, tenant: str, session_id: str, *, discard: bool = False) -> None:
        """End the generation of a tenant's session; the router that owns it learns of this with its next write.
        `discard`: drop the response's tokens."""
        sessions = self._store.sessions
        record = await open_record(sessions, tenant, session_id)
        if record.turn is None or record.finished:
            return
        kept = (await sessions.read(session_id)).tokens[: record.turn.answer_position] if discard else None
        owned = await sessions.acquire(session_id, record.epoch, self._store.owner())
        await owned.finish(FinishReason.CANCELLED.value, record.usage, kept)

    async def _resumable(self, record: SessionRecord, generation: int) -> SessionTurn:
        """Return the turn of a session's latest generation.

        Raises NotFound if there is no generation, or none that can be resumed, and InvalidRequest if `generation` is
        not the latest; 0 stands for the latest.
        """
        session_id, turn = record.session_id, record.turn
        if turn is None or generation > record.generation:
            raise NotFound(f"session {session_id} has no generation {generation or 1}")
        if generation and generation < record.generation:
            raise InvalidRequest("generation", f"is {generation}, only the latest ({record.generation}) can be resumed")
        if not record.finished and await self._store.sessions.lapsed(session_id):
            raise NotFound(f"generation {record.generation} of session {session_id} was not resumed in time")
        return turn

    def _open(self, found: FoundGeneration, record: SessionRecord, token_log: TokenLog | None) -> OpenedGeneration:
        """Return the generation: to decode under `token_log`, or with None, to read."""
        stored = found.turn.deadline
        if token_log is None and found.response.scoring:
            raise Conflict(
                f"next_position: is {found.client.position}, but the log-probabilities of a prompt are not kept: "
                f"generate anew, or resume behind the prompt, from {found.response.start} on"
            )
        return OpenedGeneration(
            model=found.model,
            record=record,
            turn=found.turn,
            token_log=token_log,
            response=found.response,
            missing=unsent_parts(found.parts, *found.client),
            client=found.client,
            policy=self._policy(record.plan, found.model, found.turn.contract),
            deadline=math.inf if stored is None else time.monotonic() + stored - self._store.clock.now(),
            read=found.tokens if token_log is None else (),
        )


def resumed_policy(
    config: RouterConfig, warm_start: WarmStart, plan: Plan, model: ServedModel, contract: Contract
) -> GammaPolicy:
    """Return the policy of a resumed generation, whose last plan is given."""
    # A plan of depth 0 that never changed was requested; one that changed may have rested its drafters for a while.
    name = config.policy if plan.depth or plan.version > 1 else "off"
    return policy(name, ceilings(config), warm_start.priors(model, contract))


async def open_record(sessions: Sessions, tenant: str, session_id: str) -> SessionRecord:
    """Return the record of a tenant's session that is not closed. Raises NotFound."""
    record = await sessions.get(session_id, tenant)
    if record.closed:
        raise NotFound(f"session {session_id} is closed")
    return record


def new_response(model: ServedModel, prompt: Sequence[int], turn: SessionTurn, usage: UsageStats) -> Response:
    """Return the response that is to follow a prompt."""
    silent = () if turn.include_stop else turn.contract.stop_ids
    shown = None if turn.special_tokens else model.marks
    detokenizer = Detokenizer(model.tokenizer, prompt, silent=silent, shown=shown)
    form = model.form_behind(prompt, within_reasoning=turn.within_reasoning)
    text = AnswerText(
        detokenizer,
        turn.stops,
        unstopped=turn.contract.min_tokens,
        reasoning=form.reasoning,
        include_stop=turn.include_stop,
    )
    return Response(prompt, turn.contract, text, usage, form)


def _check_same(found: SessionRecord, now: SessionRecord) -> None:
    """Raise InvalidRequest if a later generation has begun since the session was found, NotFound if it was closed."""
    if now.closed:
        raise NotFound(f"session {now.session_id} is closed")
    if now.generation > found.generation:
        raise InvalidRequest("generation", f"is {found.generation}, and a later generation has begun")
