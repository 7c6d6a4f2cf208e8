"""How this router becomes the owner of a generation: it begins a new one, or takes one over from its last owner."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.config import RouterConfig
from outrider.core.control.depth.policies import GammaPolicy, policy
from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.core.session.contract import FinishReason
from outrider.core.session.protocol import Origin
from outrider.errors import Busy, Conflict, InvalidRequest, NotFound, Superseded, TokenizerMismatch, Unavailable
from outrider.limits.fair_turns import LoopTurns
from outrider.offload import offload_if_long
from outrider.store.redis.client import decoding
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.registry import Worker
from outrider.store.session_events import SessionEvents
from outrider.store.sessions import SessionRecord, Sessions, SessionTurn, claim_name
from outrider.store.tenant_storage import TenantStorage, generation_bytes
from outrider.wire.tickets import TicketSigner
from router.background import BackgroundTasks
from router.counters.request_metrics import RouterMetrics
from router.counters.usage_stats import UsageStats
from router.drafters.warm_start import WarmStart
from router.requests.requests import Conversation, GenerateParams, ceilings, check_fits, empty_prompt, fill_context
from router.requests.served_models import ServedModel
from router.scheduling.adapters import AdapterDirectory
from router.scheduling.admission import Admission
from router.scheduling.workers import WorkerPool
from router.sessions.response import Response, ResponsePart, position_beyond_log, unsent_parts
from router.sessions.sample_writer import SampleWriter
from router.sessions.token_log import TokenLog
from router.sessions.verifier_link import VerifierLinks
from router.text.detokenizer import AnswerText, Detokenizer


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What all generations of a router share."""

    router_id: str
    config: RouterConfig
    models: Mapping[str, ServedModel]
    worker_pool: WorkerPool
    verifier_links: VerifierLinks
    sessions: Sessions
    session_events: SessionEvents
    background: BackgroundTasks
    admission: Admission
    tiers: TierSwitch
    ticket_signer: TicketSigner
    warm_start: WarmStart
    sample_writer: SampleWriter
    storage: TenantStorage
    metrics: RouterMetrics
    adapters: AdapterDirectory
    clock: RedisClock
    turns: LoopTurns = field(default_factory=LoopTurns)  # turns at reading again from the log

    def owner(self) -> str:
        """Return a new name for one acquisition of a session."""
        return f"{self.router_id}/{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class OpenedGeneration:
    """A generation to decode further, or, if it has ended already, to read."""

    model: ServedModel
    record: SessionRecord
    turn: SessionTurn
    token_log: TokenLog | None  # None: the generation has ended
    response: Response
    missing: Iterable[ResponsePart]  # the durable parts that the client lacks
    position: int  # position behind the tokens that the client has
    text_offset: int  # characters of the response that the client has
    policy: GammaPolicy
    forked_from: str = ""
    logged: int = 0  # tokens that were in the log before it began, where it began here
    deadline: float = math.inf  # by the monotonic clock

    @property
    def ended(self) -> FinishReason | None:
        """Why the generation ended; None while it has not."""
        return FinishReason(self.record.finished) if self.record.finished else None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinity where there is none."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class FoundGeneration:
    """A generation that its client may resume: what its log held when it was read, and where the client stands."""

    model: ServedModel
    record: SessionRecord
    turn: SessionTurn
    response: Response  # with the log's tokens in it
    parts: list[ResponsePart]  # of the response
    tokens: list[int]  # all of the session's
    logprobs: bytearray  # of the response
    position: int
    text_offset: int

    def open(self, router: RouterContext, record: SessionRecord, token_log: TokenLog | None) -> OpenedGeneration:
        """Return the generation: to decode under `token_log`, or with None, to read."""
        # A plan of depth 0 that never changed was requested; one that changed may have rested its drafters for a while.
        name = router.config.policy if record.plan.depth or record.plan.version > 1 else "off"
        gamma = policy(name, ceilings(router.config), router.warm_start.priors(self.model, self.turn.contract))
        stored = self.turn.deadline
        return OpenedGeneration(
            self.model,
            record,
            self.turn,
            token_log,
            self.response,
            unsent_parts(self.parts, self.position, self.text_offset),
            self.position,
            self.text_offset,
            gamma,
            deadline=math.inf if stored is None else time.monotonic() + stored - router.clock.now(),
        )


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


async def begin(
    router: RouterContext, params: GenerateParams, session: SessionRecord | None, deadline: float
) -> OpenedGeneration:
    """Begin a new generation, in `session` or in a new session; or return the one that was begun with the same
    idempotency key. `deadline` is by the monotonic clock, infinity for none.

    What is refused leaves nothing in Redis. Raises InvalidRequest and TokenizerMismatch, Unavailable when no verifier
    serves the model, Busy while another generation of the session runs, Overloaded where the tenant keeps too much.
    """
    holder = ""
    if params.idempotency_key:
        holder = await router.sessions.claimed(params.tenant, params.idempotency_key, params.fingerprint)
        if holder and (first := await _take_over_started(router, params, *_place(holder))):
            return first
    history = _held(await _history(router.sessions, params, session), holder)
    if isinstance(params.prompt, Conversation) and history.logged and not params.whole_history:
        raise InvalidRequest(
            "messages",
            "are a whole conversation, but the session has tokens already; send all messages and set whole_history",
        )
    params = _behind_reasoning(params, history.tokens)
    verifiers = await matching_verifiers(router, params.model)
    if params.fills_context:
        params = replace(params, contract=fill_context(history.tokens, params.contract, verifiers))
    check_fits(history.tokens, params.contract, verifiers)
    if session is not None and session.running and await router.sessions.runs(history.session_id):
        if first := await _take_over_started(router, params, history.session_id, history.generation):
            return first
        raise Busy(f"session {history.session_id}: a generation has not ended; resume it, cancel it, or wait")
    stored = None if math.isinf(deadline) else router.clock.now() + deadline - time.monotonic()
    turn = SessionTurn(params.contract, params.stops, len(history.tokens), stored, params.request_id)
    await _reserve(router, params, history, turn)
    if params.idempotency_key:
        claim = f"{history.session_id}/{history.generation}"
        holder = await router.sessions.claim(params.tenant, params.idempotency_key, params.fingerprint, claim)
        if holder != claim and _place(holder)[0] != history.session_id:  # another call of this request was faster
            await router.storage.forget(params.tenant, history.session_id)
            history = _held(history, holder)
            await _reserve(router, params, history, turn)
        if first := await _take_over_started(router, params, *_place(holder)):
            return first
    try:
        return await _begin(router, params, history, turn, deadline)
    except (Superseded, Conflict):  # another call began, resumed or ended a generation meanwhile
        if first := await _take_over_started(router, params, history.session_id, history.generation):
            return first
        if session is None:  # only another call of this request knows the session, or Redis' reply was lost
            raise Unavailable(f"session {history.session_id} changed while its generation began; retry") from None
        raise Busy(f"session {history.session_id}: another call began a generation first; resume it, or wait") from None


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


async def _reserve(router: RouterContext, params: GenerateParams, history: _History, turn: SessionTurn) -> None:
    """Count a generation that is about to begin, and its claim. Raises Overloaded."""
    await router.storage.reserve(
        params.tenant,
        history.session_id,
        history.generation,
        generation_bytes(len(history.tokens) - history.logged, turn),
        new=history.expected == 0,
        claim=claim_name(params.tenant, params.idempotency_key) if params.idempotency_key else "",
    )


async def take_over(
    router: RouterContext, tenant: str, session_id: str, generation: int, next_position: int, text_offset: int
) -> OpenedGeneration:
    """Take the latest generation of a tenant's session over from its owner, for a client that has everything before
    that position and text offset.

    Raises as `find` and `take`.
    """
    return await take(router, await find(router, tenant, session_id, generation, next_position, text_offset))


async def find(
    router: RouterContext, tenant: str, session_id: str, generation: int, next_position: int, text_offset: int
) -> FoundGeneration:
    """Read the latest generation of a tenant's session from its log, for a client that has everything before
    `next_position` and `text_offset`; 0 and 0 stand for a client that has nothing. The owner is not disturbed.

    Raises NotFound when there is no generation or it was not resumed in time, InvalidRequest when `generation` is not
    the latest or the position is not in it, Conflict for a position beyond the log.
    """
    record = await open_record(router.sessions, tenant, session_id)
    turn = await _resumable(router, record, generation)
    model = router.models.get(record.model)
    if model is None:
        raise NotFound(f"model {record.model!r} of session {session_id} is not served here")
    if 0 < next_position < turn.answer_position:
        begins = f"the answer begins at {turn.answer_position}, so a later generation has begun"
        raise InvalidRequest("next_position", f"is {next_position}, and {begins}")
    if next_position > record.length:
        raise position_beyond_log(next_position, record.length)
    log = await router.sessions.read(session_id)
    now = await router.sessions.get(session_id)  # the log may be newer than the record
    _check_same(record, now)
    if now.finished and len(log.tokens) != now.length:  # the generation ended since, so the log is final
        log = await router.sessions.read(session_id)
        _check_same(record, await router.sessions.get(session_id))
    prompt, output = log.tokens[: turn.answer_position], log.tokens[turn.answer_position :]
    if len(prompt) < turn.answer_position:
        raise Conflict(f"session {session_id}: its log is shorter than its prompt; Redis lost it")
    response = await offload_if_long(prompt, _new_response, model, prompt, turn, UsageStats(now.usage))
    parts = await response.replay(output, log.logprobs, router.turns, tenant)
    if now.finished:
        parts.append(response.flush())
    next_position = max(next_position, response.start)
    response.check_reached(next_position, text_offset)
    return FoundGeneration(
        model, now, turn, response, parts, [*log.tokens], bytearray(log.logprobs), next_position, text_offset
    )


async def take(router: RouterContext, found: FoundGeneration) -> OpenedGeneration:
    """Make a found generation this router's, unless it has ended.

    Raises InvalidRequest when a later generation has begun, NotFound when it was not resumed in time, Superseded when
    another call takes it over at the same time.
    """
    session_id = found.record.session_id
    record = found.record if found.record.finished else await router.sessions.get(session_id)
    _check_same(found.record, record)
    await _resumable(router, record, record.generation)
    if record.finished and found.record.finished:
        return found.open(router, record, None)
    owned = await router.sessions.acquire(session_id, record.epoch, router.owner())
    try:
        record = await router.sessions.get(session_id)  # its owner may have ended it meanwhile
        if (record.epoch, record.owner) != (owned.epoch, owned.owner):
            raise Superseded(f"session {session_id} belongs to {record.owner} since epoch {record.epoch}; do not retry")
        log = await router.sessions.read(session_id, len(found.tokens))
        found.tokens.extend(log.tokens)
        found.logprobs.extend(log.logprobs)
        parts = await found.response.replay(log.tokens, log.logprobs, router.turns, record.tenant)
        found.parts.extend(parts)
        if record.length != len(found.tokens):
            raise Unavailable(f"session {session_id} changed while it was read; resume it")
        if record.finished:
            found.parts.append(found.response.flush())
            await owned.release(record.usage)
            return found.open(router, record, None)
        token_log = TokenLog(router.sessions, owned, record, found.tokens, bytes(found.logprobs))
        return found.open(router, record, token_log)
    except BaseException:
        router.background.spawn(owned.release(record.usage))  # for the next owner
        raise


async def _resumable(router: RouterContext, record: SessionRecord, generation: int) -> SessionTurn:
    """Return the turn of a session's latest generation.

    Raises NotFound if there is no generation, or none that can be resumed, and InvalidRequest if `generation` is not
    the latest; 0 stands for the latest.
    """
    session_id, turn = record.session_id, record.turn
    if turn is None or generation > record.generation:
        raise NotFound(f"session {session_id} has no generation {generation or 1}")
    if generation and generation < record.generation:
        raise InvalidRequest("generation", f"is {generation}, only the latest ({record.generation}) can be resumed")
    if not record.finished and await router.sessions.lapsed(session_id):
        raise NotFound(f"generation {record.generation} of session {session_id} was not resumed in time")
    return turn


def _check_same(found: SessionRecord, now: SessionRecord) -> None:
    """Raise InvalidRequest if a later generation has begun since the session was found, NotFound if it was closed."""
    if now.closed:
        raise NotFound(f"session {now.session_id} is closed")
    if now.generation > found.generation:
        raise InvalidRequest("generation", f"is {found.generation}, and a later generation has begun")


async def _take_over_started(
    router: RouterContext, params: GenerateParams, session_id: str, generation: int
) -> OpenedGeneration | None:
    """Take over the generation that this very request began before, as `generation` of a session or a later one; None
    if it did not.

    Raises InvalidRequest when a later generation has begun since, so that the request's generation is not known.
    """
    try:
        record = await router.sessions.get(session_id)
    except NotFound:
        return None
    if record.turn is not None and params.idempotency_key and record.turn.request == params.request_id:
        return await take_over(router, params.tenant, session_id, record.generation, 0, 0)
    if record.generation > generation:
        raise InvalidRequest("idempotency_key", "was used for an earlier generation of this session; use a new key")
    return None


async def end(router: RouterContext, tenant: str, session_id: str) -> None:
    """End the generation of a tenant's session; the router that owns it learns of this with its next write."""
    record = await open_record(router.sessions, tenant, session_id)
    if record.turn is None or record.finished:
        return
    owned = await router.sessions.acquire(session_id, record.epoch, router.owner())
    await owned.finish(FinishReason.CANCELLED.value, record.usage)


async def open_record(sessions: Sessions, tenant: str, session_id: str) -> SessionRecord:
    """Return the record of a tenant's session that is not closed. Raises NotFound."""
    record = await sessions.get(session_id, tenant)
    if record.closed:
        raise NotFound(f"session {session_id} is closed")
    return record


async def matching_verifiers(router: RouterContext, model: ServedModel, origin: Origin | None = None) -> list[Worker]:
    """Return the verifiers that serve a model with the router's tokenizer, best choice first; with an `origin` those
    that may go on with a text of it.

    Raises Unavailable when no verifier serves the model or none may go on, TokenizerMismatch when all of them have
    another tokenizer.
    """
    verifiers = await router.worker_pool.serving(model.name)
    matching = [worker for worker in verifiers if worker.tokenizer_digest == model.digest]
    if not matching:
        raise TokenizerMismatch(
            f"the router's tokenizer for model {model.name!r} is not its verifiers' own; "
            "give the router the tokenizer.json of their checkpoint"
        )
    if origin is not None:
        equal = [worker for worker in matching if worker.origin == origin]
        if not equal:
            there = "; ".join(sorted({f"{worker.origin}" for worker in matching}))
            raise Unavailable(
                f"the generation began under {origin}, and the verifiers of model {model.name!r} have {there}, so its "
                "text might change; start a verifier that has the same, or generate anew"
            )
        return equal
    return matching


async def _begin(
    router: RouterContext, params: GenerateParams, history: _History, turn: SessionTurn, deadline: float
) -> OpenedGeneration:
    sessions, plan = router.sessions, params.policy.plan()
    if history.expected == 0:
        await sessions.create(history.session_id, params.tenant, params.model.name, params.model.digest)
    response = await offload_if_long(history.tokens, _new_response, params.model, history.tokens, turn, UsageStats())
    owned = await sessions.begin(
        history.session_id,
        history.expected,
        router.owner(),
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
    token_log = TokenLog(sessions, owned, record, history.tokens, b"")
    return OpenedGeneration(
        params.model,
        record,
        turn,
        token_log,
        response,
        (),
        response.start,
        0,
        params.policy,
        history.forked_from,
        history.logged,
        deadline,
    )


async def _history(sessions: Sessions, params: GenerateParams, session: SessionRecord | None) -> _History:
    """Return the prompt behind the session's tokens; fork the session if the request's history differs from them."""
    new = secrets.token_hex(16)
    if session is None:
        return _History(new, 0, 1, await _encode(params, first=True), 0)
    logged = (await sessions.read(session.session_id)).tokens
    if params.whole_history:
        tokens = await _encode(params, first=True)
        if tokens[: len(logged)] != logged:
            return _History(new, 0, 1, tokens, 0, session.verifier, session.session_id)
    else:
        tokens = (*logged, *await _encode(params, first=not logged))
    return _History(session.session_id, session.epoch, session.generation + 1, tokens, len(logged), session.verifier)


async def _encode(params: GenerateParams, *, first: bool) -> tuple[int, ...]:
    if params.contract.grammar is not None:
        await params.model.check_grammar(params.contract.grammar, params.tenant)
    match params.prompt:
        case str() as text:
            tokens = await params.model.encode(text, params.tenant, special=first, context=params.context)
        case Conversation(messages, tools, variables):
            tokens = await params.model.encode_chat(
                messages,
                params.tenant,
                tools=tools.definitions if tools else (),
                variables=variables,
                context=params.context,
            )
        case tokens:
            pass
    if not tokens:
        raise empty_prompt()
    return tokens


def _behind_reasoning(params: GenerateParams, tokens: Sequence[int]) -> GenerateParams:
    """Let the model reason before an answer to messages that follows a grammar, where the prompt has it reason."""
    grammar = params.contract.grammar
    if grammar is None or not isinstance(params.prompt, Conversation):
        return params
    grammar = replace(grammar, reasoning=params.model.form_behind(tokens).reasoning)
    return replace(params, contract=replace(params.contract, grammar=grammar))


def _new_response(model: ServedModel, prompt: Sequence[int], turn: SessionTurn, usage: UsageStats) -> Response:
    detokenizer = Detokenizer(model.tokenizer, prompt, silent=turn.contract.stop_ids, shown=model.marks)
    text = AnswerText(detokenizer, turn.stops, unstopped=turn.contract.min_tokens)
    return Response(prompt, turn.contract, text, usage, model.form_behind(prompt))
