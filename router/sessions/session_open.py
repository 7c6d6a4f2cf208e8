"""Begins generations: a prompt behind a session's tokens, counted, claimed, and logged under a new epoch."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from outrider.core.session.contract import FILLING
from outrider.errors import Busy, Conflict, InvalidRequest, Moved, NotFound, Superseded, Unavailable
from outrider.offload import offload_if_long
from outrider.rpc.backoff import Backoff
from outrider.store.redis.client import decoding
from outrider.store.sessions import SessionRecord, Sessions, SessionTurn, claim_name
from outrider.store.tenant_storage import generation_bytes
from router.counters.usage_stats import UsageStats
from router.requests.requests import (
    Conversation,
    GenerateParams,
    check_fits,
    empty_prompt,
    fill_context,
    longest_prompt,
)
from router.scheduling.admission import SHUTTING_DOWN
from router.scheduling.workers import WorkerPool, matching_verifiers
from router.sessions.context import SessionStore
from router.sessions.takeover import ClientPosition, OpenedGeneration, Takeovers, new_response
from router.sessions.token_log import TokenLog

FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.5  # between two looks at a generation that another call runs


@dataclass(frozen=True, slots=True)
class _History:
    """The tokens that a response continues, and the session that they belong to."""

    session_id: str
    expected: int  # the session's epoch; 0: the session is new
    generation: int  # number of the generation that is about to begin
    tokens: tuple[int, ...]
    logged: int  # how many of the tokens are durable already
    verifier: str = ""  # worker id of a verifier that may have their KV
    forked_from: str = ""


class RequestRuns(Exception):
    """Another call runs the request of this idempotency key. Once it has ended, or its router is gone, try again."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id


class GenerationOpener:
    """Begins new generations, in new sessions or in those that clients continue."""

    def __init__(self, *, store: SessionStore, worker_pool: WorkerPool, takeovers: Takeovers) -> None:
        self._store = store
        self._worker_pool = worker_pool
        self._takeovers = takeovers

    async def begin(self, params: GenerateParams, session: SessionRecord | None, deadline: float) -> OpenedGeneration:
        """Begin a new generation, in `session` or in a new session; or return the one that was begun with the same
        idempotency key. `deadline` is by the monotonic clock, infinity for none.

        What is refused leaves nothing in Redis. Raises RequestRuns while another call runs that one; InvalidRequest and
        TokenizerMismatch, Unavailable when no verifier serves the model, Busy while another generation of the session
        runs, Overloaded where the tenant keeps too much.
        """
        holder = ""
        if params.idempotency_key:
            holder = await self._store.sessions.claimed(params.tenant, params.idempotency_key, params.fingerprint)
            if holder and (first := await self._take_over_started(params, *_place(holder))):
                return first
        if params.truncated_to == FILLING:
            serving = await matching_verifiers(self._worker_pool, params.model)
            params = replace(params, truncated_to=longest_prompt(params.contract, serving))
        history = _held(await _history(self._store.sessions, params, session), holder)
        if isinstance(params.prompt, Conversation) and history.logged and not params.whole_history:
            raise InvalidRequest(
                "messages",
                "are a whole conversation, but the session has tokens already; send all messages and set whole_history",
            )
        params = _behind_reasoning(params, history.tokens)
        verifiers = await matching_verifiers(self._worker_pool, params.model)
        if params.fills_context:
            params = replace(params, contract=fill_context(history.tokens, params.contract, verifiers))
        check_fits(history.tokens, params.contract, verifiers)
        if session is not None and session.running and await self._store.sessions.runs(history.session_id):
            if first := await self._take_over_started(params, history.session_id, history.generation):
                return first
            raise Busy(f"session {history.session_id}: a generation has not ended; resume it, cancel it, or wait")
        stored = None if math.isinf(deadline) else self._store.clock.now() + deadline - time.monotonic()
        within = isinstance(params.prompt, Conversation) and params.prompt.within_reasoning
        turn = SessionTurn(
            params.contract,
            params.stops,
            len(history.tokens),
            stored,
            params.request_id,
            within_reasoning=within,
            include_stop=params.include_stop,
            special_tokens=params.special_tokens,
        )
        await self._reserve(params, history, turn)
        if params.idempotency_key:
            claim = f"{history.session_id}/{history.generation}"
            holder = await self._store.sessions.claim(params.tenant, params.idempotency_key, params.fingerprint, claim)
            if holder != claim and _place(holder)[0] != history.session_id:  # another call of this request was faster
                await self._store.storage.forget(params.tenant, history.session_id)
                history = _held(history, holder)
                await self._reserve(params, history, turn)
            if first := await self._take_over_started(params, *_place(holder)):
                return first
        try:
            return await self._begin(params, history, turn, deadline)
        except (Superseded, Conflict):  # another call began, resumed or ended a generation meanwhile
            if first := await self._take_over_started(params, history.session_id, history.generation):
                return first
            if session is None:  # only another call of this request knows the session, or Redis' reply was lost
                raise Unavailable(f"session {history.session_id} changed while its generation began; retry") from None
            raise Busy(
                f"session {history.session_id}: another call began a generation first; resume it, or wait"
            ) from None

    async def ended_or_ownerless(self, session_id: str, *, closed: Callable[[], bool]) -> None:
        """Return once a session has no generation that a living router runs. Raises Moved once `closed` returns true:
        this router shuts down."""
        backoff = Backoff(FIRST_LOOK_S, LONGEST_LOOK_S)
        with suppress(NotFound):
            while self._owned(await self._store.sessions.get(session_id)):
                if closed():
                    raise Moved(SHUTTING_DOWN)
                await backoff.wait()

    def _owned(self, record: SessionRecord) -> bool:
        """Return whether a generation runs at a router that lives."""
        return record.running and record.lease > self._store.clock.now()

    async def _reserve(self, params: GenerateParams, history: _History, turn: SessionTurn) -> None:
        """Count a generation that is about to begin, and its claim. Raises Overloaded."""
        await self._store.storage.reserve(
            params.tenant,
            history.session_id,
            history.generation,
            generation_bytes(len(history.tokens) - history.logged, turn),
            new=history.expected == 0,
            claim=claim_name(params.tenant, params.idempotency_key) if params.idempotency_key else "",
        )

    async def _take_over_started(
        self, params: GenerateParams, session_id: str, generation: int
    ) -> OpenedGeneration | None:
        """Take over the generation that this very request began before, as `generation` of a session or a later one;
        None if it did not.

        Raises RequestRuns while a router that lives runs it, InvalidRequest when a later generation has begun since, so
        that the request's generation is not known.
        """
        try:
            record = await self._store.sessions.get(session_id)
        except NotFound:
            return None
        if record.turn is not None and params.idempotency_key and record.turn.request == params.request_id:
            here = record.owner.startswith(f"{self._store.router_id}/")
            if self._owned(record) and (here or not params.broke_off):
                raise RequestRuns(session_id)
            try:
                return await self._takeovers.take_over(params.tenant, session_id, record.generation, ClientPosition())
            except Superseded:  # another call was faster
                raise RequestRuns(session_id) from None
        if record.generation > generation:
            raise InvalidRequest("idempotency_key", "was used for an earlier generation of this session; use a new key")
        return None

    async def _begin(
        self, params: GenerateParams, history: _History, turn: SessionTurn, deadline: float
    ) -> OpenedGeneration:
        sessions, plan = self._store.sessions, params.policy.plan()
        if history.expected == 0:
            await sessions.create(history.session_id, params.tenant, params.model.name, params.model.digest)
        response = await offload_if_long(history.tokens, new_response, params.model, history.tokens, turn, UsageStats())
        owned = await sessions.begin(
            history.session_id,
            history.expected,
            self._store.owner(),
            turn,
            history.logged,
            history.tokens[history.logged :],
            response.digest,
            plan=plan,
            verifier=history.verifier,
        )
        record = SessionRecord(
            session_id=history.session_id,
            tenant=params.tenant,
            model=params.model.name,
            tokenizer_digest=params.model.digest,
            generation=history.generation,
            turn=turn,
            plan=plan,
            verifier=history.verifier,
            epoch=owned.epoch,
        )
        return OpenedGeneration(
            model=params.model,
            record=record,
            turn=turn,
            token_log=TokenLog(sessions, owned, record, history.tokens, b""),
            response=response,
            client=ClientPosition(response.scored),
            policy=params.policy,
            forked_from=history.forked_from,
            logged=history.logged,
            deadline=deadline,
        )


def _place(holder: str) -> tuple[str, int]:
    """Return the session and the generation that a claim is for."""
    session_id, _, number = holder.rpartition("/")
    with decoding("an idempotency key's entry"):
        return session_id, int(number)


def _held(history: _History, holder: str) -> _History:
    """Return a history in the session that holds the request's idempotency key: the call that claimed it died before it
    began. "": none holds it."""
    if not holder or (session_id := _place(holder)[0]) == history.session_id:
        return history
    return replace(history, session_id=session_id, expected=0)


async def _history(sessions: Sessions, params: GenerateParams, session: SessionRecord | None) -> _History:
    """Return the prompt behind the session's tokens; fork the session if the request's history differs from them."""
    new = secrets.token_hex(16)
    if session is None:
        return _History(new, 0, 1, await encode_prompt(params, first=True), 0)
    logged = (await sessions.read(session.session_id)).tokens
    if params.whole_history:
        tokens = await encode_prompt(params, first=True)
        if tokens[: len(logged)] != logged:
            return _History(new, 0, 1, tokens, 0, session.verifier, session.session_id)
    else:
        tokens = (*logged, *await encode_prompt(params, first=not logged))
    return _History(session.session_id, session.epoch, session.generation + 1, tokens, len(logged), session.verifier)


async def encode_prompt(params: GenerateParams, *, first: bool) -> tuple[int, ...]:
    """Return the tokens of a request's prompt, which is not empty; `first`: with the tokens that the tokenizer itself
    puts around a text. Raises InvalidRequest, and Overloaded when too many of the tenant's prompts wait."""
    if params.contract.grammar is not None:
        await params.model.check_grammar(params.contract.grammar, params.tenant)
    match params.prompt:
        case str() as text:
            tokens = await params.model.encode(
                text,
                params.tenant,
                special=first and params.adds_special,
                context=params.context,
                truncated_to=params.truncated_to,
            )
        case Conversation(messages, tools, variables, end=end, template=template):
            tokens = await params.model.encode_chat(
                messages,
                params.tenant,
                tools=tools.definitions if tools else (),
                variables=variables,
                context=params.context,
                end=end,
                template=template,
            )
        case tokens:
            pass
    if not tokens:
        raise empty_prompt()
    return tokens[-params.truncated_to :] if params.truncated_to else tokens


def _behind_reasoning(params: GenerateParams, tokens: Sequence[int]) -> GenerateParams:
    """Let the model reason before an answer to messages that follows a grammar, where the prompt has it reason."""
    grammar = params.contract.grammar
    if grammar is None or not isinstance(params.prompt, Conversation):
        return params
    form = params.model.form_behind(tokens, within_reasoning=params.prompt.within_reasoning)
    grammar = replace(grammar, reasoning=form.reasoning)
    return replace(params, contract=replace(params.contract, grammar=grammar))
