"""How a generation becomes this router's: begun, or taken over from whoever had it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.aside import aside
from outrider.config import RouterConfig
from outrider.core.control import GammaPolicy, policy
from outrider.core.tiers import TierChoice
from outrider.errors import Busy, Conflict, InvalidRequest, NotFound, Superseded, TokenizerMismatch, Unavailable
from outrider.store.client import ours
from outrider.store.registry import Worker
from outrider.store.sessions import SessionRecord, Sessions, Turn
from router.admission import Admission
from router.answer import Answer, Part, Reason, after, beyond
from router.background import Background
from router.fleet import Fleet
from router.ledger import Ledger
from router.lessons import Lessonbook
from router.models import ServedModel
from router.requests import Ask, Conversation, ceilings, check_fits, empty_prompt, filled
from router.teaching import Teaching
from router.telling import Metrics
from router.text import AnswerText, Detokenizer
from router.usage import Figures


@dataclass(frozen=True, slots=True)
class Cluster:
    """What generations share."""

    router_id: str
    config: RouterConfig
    models: Mapping[str, ServedModel]
    fleet: Fleet
    sessions: Sessions
    background: Background
    admission: Admission
    tiers: TierChoice
    ticket_key: Callable[[], Awaitable[bytes]]
    lessons: Lessonbook
    teaching: Teaching
    metrics: Metrics

    def owner(self) -> str:
        """A name for one acquisition of a session."""
        return f"{self.router_id}/{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Opened:
    """A generation to go on with, or, when it has ended already, to be read."""

    model: ServedModel
    record: SessionRecord
    turn: Turn
    ledger: Ledger | None  # None: it has ended
    answer: Answer
    missing: Iterable[Part]  # what the client lacks of what is durable
    position: int  # behind the tokens that the client has
    text_offset: int  # characters of the answer that it has
    policy: GammaPolicy
    forked_from: str = ""

    @property
    def ended(self) -> Reason | None:
        """Why it ended."""
        return Reason(self.record.finished) if self.record.finished else None


@dataclass(frozen=True, slots=True)
class Found:
    """A generation that its client may go on with: what its log held when it was read, and where the client stands."""

    model: ServedModel
    record: SessionRecord
    turn: Turn
    answer: Answer  # that has taken the log
    parts: list[Part]  # of that
    tokens: list[int]  # of the session
    logprobs: bytearray  # of the answer
    position: int
    text_offset: int

    def opened(self, cluster: Cluster, record: SessionRecord, ledger: Ledger | None) -> Opened:
        """The generation, to go on with under a ledger of ours, or to be read."""
        # A plan that never changed and has no depth was asked for; another may have let its drafters go for a while.
        name = cluster.config.policy if record.plan.depth or record.plan.version > 1 else "off"
        gamma = policy(name, ceilings(cluster.config), cluster.lessons.of(self.model, self.turn.contract.heat))
        missing = after(self.parts, self.position, self.text_offset)
        return Opened(
            self.model, record, self.turn, ledger, self.answer, missing, self.position, self.text_offset, gamma
        )


@dataclass(frozen=True, slots=True)
class _History:
    """The tokens that an answer continues, and the session they stand in."""

    session_id: str
    expected: int  # the session's epoch; 0: it is new
    generation: int  # that is about to begin
    tokens: tuple[int, ...]
    logged: int  # of these, durable already
    verifier: str = ""  # where KV of theirs may be
    forked_from: str = ""


async def begin(cluster: Cluster, ask: Ask, held: SessionRecord | None, deadline: float | None) -> Opened:
    """A new generation, in `held` or in a session of its own; or the one that was begun with the same key.

    Raises InvalidRequest and TokenizerMismatch, Unavailable when nobody serves the model, Busy while another
    generation of the session runs.
    """
    history = await _history(cluster.sessions, ask, held)
    if ask.key:
        place = f"{history.session_id}/{history.generation}"
        first = await cluster.sessions.claim(ask.tenant, ask.key, ask.fingerprint, place)
        session_id, _, number = first.rpartition("/")
        with ours("an idempotency key's entry"):
            generation = int(number)
        if record := await _begun(cluster, ask, session_id, generation):
            return await take_over(cluster, ask.tenant, session_id, record.generation, 0, 0)
        if session_id != history.session_id:  # whoever claimed the key first has died before it began
            history = replace(history, session_id=session_id, expected=0)
    if isinstance(ask.prompt, Conversation) and history.logged and not ask.whole_history:
        raise InvalidRequest(
            "messages", "are a whole conversation, and the session has a past; send all of it, and set whole_history"
        )
    verifiers = await suitable(cluster, ask.model)
    if ask.fills:
        ask = replace(ask, contract=filled(history.tokens, ask.contract, verifiers))
    check_fits(history.tokens, ask.contract, verifiers)
    try:
        return await _begin(cluster, ask, history, deadline)
    except (Superseded, Conflict):  # somebody has begun, gone on with, or ended a generation since we looked
        if record := await _begun(cluster, ask, history.session_id, history.generation):
            return await take_over(cluster, ask.tenant, history.session_id, record.generation, 0, 0)
        if held is None:  # nobody else knows the session: it was this request's other call, or a reply of ours was lost
            raise Unavailable(f"session {history.session_id} changed while it was begun; ask again") from None
        raise Busy(f"session {history.session_id}: somebody else was faster; resume its generation, or wait") from None


async def take_over(
    cluster: Cluster, tenant: str, session_id: str, generation: int, next_position: int, text_offset: int
) -> Opened:
    """The latest generation of a tenant's session, from whoever owned it, for a client that has all before that place.

    Raises as `find` and `take`.
    """
    return await take(cluster, await find(cluster, tenant, session_id, generation, next_position, text_offset))


async def find(
    cluster: Cluster, tenant: str, session_id: str, generation: int, next_position: int, text_offset: int
) -> Found:
    """The latest generation of a tenant's session, as its log has it, for a client that has all before that place; 0
    and 0: for one that has nothing. Nobody is disturbed yet.

    Raises NotFound when there is none or it was not resumed in time, InvalidRequest when it is not the latest or the
    place is not in it, Conflict for a place beyond the log.
    """
    record = await open_record(cluster.sessions, tenant, session_id)
    turn = _resumable(record, generation)
    model = cluster.models.get(record.model)
    if model is None:
        raise NotFound(f"model {record.model!r} of session {session_id} is not served here")
    if 0 < next_position < turn.answer_position:
        begins = f"the answer begins at {turn.answer_position}, so the session has gone on"
        raise InvalidRequest("next_position", f"is {next_position}, and {begins}")
    if next_position > record.length:
        raise beyond(next_position, record.length)
    log = await cluster.sessions.read(session_id)
    now = await cluster.sessions.get(session_id)  # what was read may be newer than the record
    _check_same(record, now)
    if now.finished and len(log.tokens) != now.length:  # it has ended since: nothing more comes
        log = await cluster.sessions.read(session_id)
        _check_same(record, await cluster.sessions.get(session_id))
    prompt, said = log.tokens[: turn.answer_position], log.tokens[turn.answer_position :]
    if len(prompt) < turn.answer_position:
        raise Conflict(f"session {session_id}: its log is shorter than its prompt; Redis lost it")
    answer = await aside(prompt, _answer, model, prompt, turn, Figures(now.usage))
    parts = await answer.recall(said, log.logprobs)
    if now.finished:
        parts.append(answer.rest())
    next_position = max(next_position, answer.start)
    answer.check_reached(next_position, text_offset)
    return Found(model, now, turn, answer, parts, [*log.tokens], bytearray(log.logprobs), next_position, text_offset)


async def take(cluster: Cluster, found: Found) -> Opened:
    """Makes a generation that was found ours, unless it has ended.

    Raises InvalidRequest when the session has gone on, NotFound when it was not resumed in time, Superseded when
    somebody else takes it over at the same time.
    """
    session_id = found.record.session_id
    record = found.record if found.record.finished else await cluster.sessions.get(session_id)
    _check_same(found.record, record)
    _resumable(record, record.generation)
    if record.finished and found.record.finished:
        return found.opened(cluster, record, None)
    owned = await cluster.sessions.acquire(session_id, record.epoch, cluster.owner())
    try:
        record = await cluster.sessions.get(session_id)  # its owner may have ended it in the meantime
        if (record.epoch, record.owner) != (owned.epoch, owned.owner):
            raise Superseded(f"session {session_id} belongs to {record.owner} since epoch {record.epoch}; do not retry")
        log = await cluster.sessions.read(session_id, len(found.tokens))  # nobody else can append now
        found.tokens.extend(log.tokens)
        found.logprobs.extend(log.logprobs)
        found.parts.extend(await found.answer.recall(log.tokens, log.logprobs))
        if record.length != len(found.tokens):
            raise Unavailable(f"session {session_id} changed while it was read; resume it")
        if record.finished:
            found.parts.append(found.answer.rest())
            await owned.release(record.usage)
            return found.opened(cluster, record, None)
        ledger = Ledger(cluster.sessions, owned, record, found.tokens, bytes(found.logprobs))
        return found.opened(cluster, record, ledger)
    except BaseException:
        cluster.background.spawn(owned.release(record.usage))  # for whoever comes next
        raise


def _resumable(record: SessionRecord, generation: int) -> Turn:
    """The turn of a session's latest generation. Raises NotFound where there is none, or none that can be resumed, and
    InvalidRequest where another one is asked for; 0 stands for the latest."""
    session_id, turn = record.session_id, record.turn
    if turn is None or generation > record.generation:
        raise NotFound(f"session {session_id} has no generation {generation or 1}")
    if generation and generation < record.generation:
        raise InvalidRequest("generation", f"is {generation}, only the latest ({record.generation}) can be resumed")
    if not record.finished and max(record.lease, record.resumable) < time.time():
        raise NotFound(f"generation {record.generation} of session {session_id} was not resumed in time")
    return turn


def _check_same(found: SessionRecord, now: SessionRecord) -> None:
    """Raises InvalidRequest when a session has gone on since it was found, NotFound when it was closed."""
    if now.closed:
        raise NotFound(f"session {now.session_id} is closed")
    if now.generation > found.generation:
        raise InvalidRequest("generation", f"is {found.generation}, and the session has gone on")


async def _begun(cluster: Cluster, ask: Ask, session_id: str, generation: int) -> SessionRecord | None:
    """The session in which this very request was begun before, as `generation` or a later one; None if it was not.

    Raises InvalidRequest when the session has gone on since, so that nobody can tell.
    """
    try:
        record = await cluster.sessions.get(session_id)
    except NotFound:
        return None
    if record.turn is not None and ask.key and record.turn.request == ask.name:
        return record
    if record.generation > generation:
        raise InvalidRequest("idempotency_key", "is of an earlier turn, and the session has gone on; use a new key")
    return None


async def end(cluster: Cluster, tenant: str, session_id: str) -> None:
    """Ends the generation of a tenant's session, whichever router has it: that one finds out with its next write."""
    record = await open_record(cluster.sessions, tenant, session_id)
    if record.turn is None or record.finished:
        return
    owned = await cluster.sessions.acquire(session_id, record.epoch, cluster.owner())
    await owned.finish(Reason.CANCELLED.value, record.usage)


async def open_record(sessions: Sessions, tenant: str, session_id: str) -> SessionRecord:
    """The record of a tenant's session that is not closed. Raises NotFound."""
    record = await sessions.get(session_id, tenant)
    if record.closed:
        raise NotFound(f"session {session_id} is closed")
    return record


async def suitable(cluster: Cluster, model: ServedModel) -> list[Worker]:
    """The verifiers that serve a model with our tokenizer, best choice first.

    Raises Unavailable when nobody serves it, TokenizerMismatch when all do with another tokenizer.
    """
    verifiers = await cluster.fleet.verifiers(model.name)
    if not verifiers:
        raise Unavailable(f"no verifier serves model {model.name!r} right now; start one, or try again")
    matching = [worker for worker in verifiers if worker.tokenizer_digest == model.digest]
    if not matching:
        raise TokenizerMismatch(
            f"the router's tokenizer for model {model.name!r} is not its verifiers' own; "
            "give the router the tokenizer.json of their checkpoint"
        )
    return matching


async def _begin(cluster: Cluster, ask: Ask, history: _History, deadline: float | None) -> Opened:
    sessions, plan = cluster.sessions, ask.policy.plan()
    turn = Turn(ask.contract, ask.stops, len(history.tokens), deadline, ask.name)
    if history.expected == 0:
        await sessions.create(history.session_id, ask.tenant, ask.model.name, ask.model.digest)
    answer = await aside(history.tokens, _answer, ask.model, history.tokens, turn, Figures())
    owned = await sessions.begin(
        history.session_id,
        history.expected,
        cluster.owner(),
        turn,
        history.logged,
        history.tokens[history.logged :],
        answer.digest,
        plan=plan,
        verifier=history.verifier,
    )
    record = SessionRecord(
        session_id=history.session_id,
        tenant=ask.tenant,
        model=ask.model.name,
        tokenizer_digest=ask.model.digest,
        generation=history.generation,
        turn=turn,
        plan=plan,
        verifier=history.verifier,
        epoch=owned.epoch,
    )
    ledger = Ledger(sessions, owned, record, history.tokens, b"")
    return Opened(ask.model, record, turn, ledger, answer, (), answer.start, 0, ask.policy, history.forked_from)


async def _history(sessions: Sessions, ask: Ask, held: SessionRecord | None) -> _History:
    """The prompt behind what the session holds; forked off where it claims another past."""
    new = secrets.token_hex(16)
    if held is None:
        return _History(new, 0, 1, await _encode(ask, first=True), 0)
    logged = (await sessions.read(held.session_id)).tokens
    if ask.whole_history:
        tokens = await _encode(ask, first=True)
        if tokens[: len(logged)] != logged:
            return _History(new, 0, 1, tokens, 0, held.verifier, held.session_id)
    else:
        tokens = (*logged, *await _encode(ask, first=not logged))
    return _History(held.session_id, held.epoch, held.generation + 1, tokens, len(logged), held.verifier)


async def _encode(ask: Ask, *, first: bool) -> tuple[int, ...]:
    match ask.prompt:
        case str() as text:
            tokens = await ask.model.encode(text, special=first)
        case Conversation() as messages:
            tokens = await ask.model.encode_chat(messages)
        case tokens:
            pass
    if not tokens:
        raise empty_prompt()
    return tokens


def _answer(model: ServedModel, prompt: Sequence[int], turn: Turn, figures: Figures) -> Answer:
    detokenizer = Detokenizer(model.tokenizer, prompt, silent=turn.contract.stop_ids)
    text = AnswerText(detokenizer, turn.stops, unstopped=turn.contract.min_tokens)
    return Answer(prompt, turn.contract, text, figures)
