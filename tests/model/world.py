"""All parts together: what can happen next, what can go wrong, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.config import RouterConfig
from outrider.store.registry import Worker
from tests.model.drafting import Drafter
from tests.model.language import MODEL, VOCABULARY, answer, choice, expected_answer
from tests.model.loop import Clock
from tests.model.redis import LEASE_S, RESUME_TTL_S, Outcome, Redis, Request, Violation
from tests.model.requests import Canceller, Client, ModelRequest
from tests.model.routing import Fleet, Note, Router
from tests.model.verifying import Verifier
from tests.model.wires import Link, Notice, Wire
from tests.store import reference

WINDOW = 3
ROUTERS, VERIFIERS, DRAFTERS = 2, 2, 2
CONFIG = RouterConfig(
    models={MODEL.name: Path()},
    policy="fixed",
    depth=3,
    width=2,
    nodes=6,
    window=WINDOW,
    lease_s=LEASE_S,
    resume_ttl_s=RESUME_TTL_S,
)
PATIENCE = 4000  # events within which everything must come to its end once nothing goes wrong any more

Event = Callable[[], Any]


@dataclass(frozen=True)
class Kinds:
    """What the parts are made of. A broken kind must be found out."""

    store: type[reference.Store] = reference.Store
    redis: type[Redis] = Redis
    verifier: type[Verifier] = Verifier
    drafter: type[Drafter] = Drafter


# The details of the error that a client receives whose session has a later generation.
MOVED_ON = ("only the latest", "a later generation has begun", "an earlier generation")


class World:
    """Two routers, the log, two verifiers, two drafters, and the clients.

    `steady`: all verifiers generate the same text; otherwise each has its own roundings, and what counts is the log.
    """

    def __init__(self, kinds: Kinds = Kinds(), *, steady: bool = True) -> None:
        self.kinds = kinds
        self.steady = steady
        self.clock = Clock()
        self.redis = kinds.redis(self.clock, kinds.store)
        self.links: list[tuple[Link, str, str]] = []  # with the names of caller and server
        self.notes: list[tuple[int, Note]] = []
        self.clients: list[Client] = []
        self.cancellers: list[Canceller] = []
        self.lapsed: set[str] = set()  # sessions whose generation could not be resumed for a while
        self.cancelled: set[str] = set()  # sessions that a client wanted to end
        self.history: list[str] | None = None  # what happened, where a history is wanted
        self._lives = 0
        self._seen: dict[Client, int] = {}
        self.routers = [self._router(index) for index in range(ROUTERS)]
        self.verifiers = [self._verifier(index) for index in range(VERIFIERS)]
        self.drafters = [self._drafter(index) for index in range(DRAFTERS)]

    # What happens by itself.

    def events(self) -> list[Event]:
        """Everything that can happen next without anything going wrong."""
        self.links = [entry for entry in self.links if not entry[0].over]
        found: list[Event] = [wire.deliver for wire in self.wires() if wire.items and not wire.held]
        found += [partial(self.answer, request) for request in self.redis.requests]
        for verifier in self.verifiers:
            if verifier.passing:
                found.append(verifier.end_step)
            elif verifier.ready:
                found.append(verifier.begin_step)
        found += [partial(self.heed, note) for note in self.notes]
        found += [drafter.connect for drafter in self.drafters if drafter.cut_off]
        found += [client.call_again for client in self.clients if client.idle]
        return found

    def wires(self) -> list[Wire]:
        """Both directions of every stream."""
        return [wire for link, _, _ in self.links for wire in (link.forth, link.back)]

    def happen(self, event: Event) -> None:
        """One event, and what must hold after it."""
        self.record_event(event)
        event()
        self.check()

    def burst(self, seed: int, count: int) -> None:
        """Some events in some order."""
        chance = random.Random(seed)
        for _ in range(count):
            growing = [drafter for drafter in self.drafters if drafter.drafts]
            if growing and chance.random() < 0.2:
                self.happen(partial(chance.choice(growing).grow, chance))
            elif events := self.events():
                self.happen(chance.choice(events))
            else:
                return

    def heed(self, entry: tuple[int, Note]) -> None:
        """A drafter receives a note from a router."""
        self.notes.remove(entry)
        index, note = entry
        self.drafters[index].heed(note)

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.clock.now += seconds
        for name, session in self.redis.store.sessions.items():
            record = session.record
            if record.running and max(record.lease, record.resumable) < self.clock.now:
                self.lapsed.add(name)
        for verifier in self.verifiers:
            verifier.beat()
        for router in self.routers:
            router.loop.settle()
        self.check()

    def answer(self, request: Request, outcome: Outcome = "done") -> None:
        """A call to Redis gets there and back, or not."""
        self.redis.answer(request, outcome)

    def record_event(self, event: Any) -> None:
        """Writes it into the history."""
        if self.history is None:
            return
        match event:
            case partial(func=func, args=args):
                self.history.append(f"{func.__name__} {' '.join(map(str, args))}")
            case _:
                subject = getattr(event, "__self__", "")
                self.history.append(f"{event.__name__} {subject}")

    # What clients do.

    def ask(self, request: ModelRequest, router: int) -> Client:
        """A client asks for an answer."""
        client = Client(request, self._dial_router)
        self.clients.append(client)
        client.call(router)
        return client

    def read(self, session: str, generation: int, router: int) -> Client:
        """Another client reads an answer from its start, and takes it over."""
        client = Client(None, self._dial_router, session, generation)
        self.clients.append(client)
        client.call(router)
        return client

    def cancel(self, session: str, generation: int, router: int) -> None:
        """A client ends a generation."""
        canceller = Canceller(session, generation)
        self.cancelled.add(session)
        self.cancellers.append(canceller)
        canceller.call(self._dial_router, router)

    # What goes wrong.

    def cut(self, index: int, caller: Notice, server: Notice) -> None:
        """A stream breaks."""
        self.links[index][0].cut(caller=caller, server=server)
        self.check()

    def hold(self, pick: int) -> None:
        """The network is slow: what is on a wire, and what is put behind it, stays there for now."""
        full = [wire for wire in self.wires() if wire.items]
        if full:
            full[pick % len(full)].held = True

    def let_go(self) -> None:
        """The network is as quick as before."""
        for wire in self.wires():
            wire.held = False

    def notice(self) -> None:
        """Each side that has not noticed yet that a stream broke does."""
        for link, _, _ in list(self.links):
            for wire in list(link.deaf):
                link.notice(wire)
        self.check()

    def crash_router(self, index: int, notice: Notice) -> None:
        """A router dies, and another one takes its place. What it sent last may arrive."""
        router, requests, notes = self.routers[index], list(self.redis.requests), list(self.notes)
        died = f"{router.name}/"
        self.redis.lost = {name: "" if who.startswith(died) else who for name, who in self.redis.lost.items()}
        self._cut_all(router.name, notice)
        router.crash()
        self.redis.requests, self.notes = requests, notes
        self.routers[index] = self._router(index)
        self.check()

    def crash_verifier(self, index: int, notice: Notice) -> None:
        """A verifier dies, and one with nothing in its memory takes its place."""
        self._cut_all(self.verifiers[index].name, notice)
        self.verifiers[index] = self._verifier(index)
        self.check()

    def crash_drafter(self, index: int, notice: Notice) -> None:
        """A drafter dies, and one with nothing in its memory takes its place."""
        self._cut_all(self.drafters[index].name, notice)
        self.drafters[index] = self._drafter(index)
        self.check()

    def lose(self) -> None:
        """Redis dies and comes back with less. What its owners still hold must come back."""
        sessions = self.redis.store.sessions
        self.redis.lose(
            {
                name: session.record.owner
                for name, session in sessions.items()
                if any(self._owned_by(name, router) for router in self.routers)
            }
        )
        self.check()

    # What must hold.

    def check(self) -> None:
        """The invariants that what has just happened could have broken."""
        for router in self.routers:
            if router.trouble:
                raise Violation(f"{router.name}: {router.trouble}")
        for verifier in self.verifiers:
            for session in verifier.sessions.values():
                if len(session.tokens) - session.commits.durable > WINDOW:
                    raise Violation(f"{verifier.name}: {len(session.tokens)}, durable {session.commits.durable}")
        for client in self.clients:
            if self._seen.get(client) != (state := (len(client.tokens), client.reason, client.error)):
                self._seen[client] = state
                self._check_client(client)
        for canceller in self.cancellers:
            if canceller.answered:
                self._check_cancelled(canceller)
        self.cancellers = [canceller for canceller in self.cancellers if not canceller.answered]

    def settle(self) -> None:
        """Nothing goes wrong any more: everything comes to its end, and nothing is left."""
        self.redis.away = False
        self.let_go()
        for request in list(self.redis.late):
            self.redis.run_late(request)
        self.notice()
        left = PATIENCE
        while True:
            while left >= 0 and (events := self.events()):
                self.happen(events[left % len(events)])
                left -= 1
            if left < 0:
                raise Violation("it goes on for ever")
            waiting = [client for client in self.clients if self._tries_again(client)]
            if waiting and not any(client.link for client in self.clients):
                waiting[left % len(waiting)].call(left % ROUTERS)
                left -= 1
            elif any(router.loop.tasks for router in self.routers):
                self.advance(0.5)
                left -= 1
            else:
                break
            if left < PATIENCE // 2 and waiting:
                self.advance(RESUME_TTL_S)
        for client in self.clients:
            excused = not client.session or client.session in self.lapsed or self._gone(client.session)
            if not client.done and not excused and client.error != "InvalidRequest":
                raise Violation(f"a client ended with {client.error or 'nothing'} after {len(client.tokens)} tokens")
        self._check_left()

    def close(self) -> None:
        """Ends everything, at the end of a test."""
        for router in self.routers:
            router.crash()

    def _check_client(self, client: Client) -> None:
        log = self.redis.longest.get(client.session, [])
        end = client.prompt + len(client.tokens)
        if client.tokens and not self._gone(client.session):
            if log[client.prompt : end] != client.tokens:
                raise Violation(f"a client has {client.tokens} from {client.prompt}, where the log has {log}")
            if len(self.redis.texts.get(client.session, [])) < end and client.session not in self.redis.lost:
                raise Violation(f"a client has {end} tokens, the log {len(self.redis.texts.get(client.session, []))}")
        request = client.request or next((other.request for other in self.clients if self._same(client, other)), None)
        if request is not None and client.prompt and not self._gone(client.session):
            self._check_text(client, request, tuple(log[: client.prompt]))
        self._check_end(client)

    def _check_text(self, client: Client, request: ModelRequest, prompt: tuple[int, ...]) -> None:
        if prompt[-len(request.prompt) :] != request.prompt:
            raise Violation(f"a client that asked {request.prompt} reads what follows {prompt}")
        tokens, whole = tuple(client.tokens), client.reason in ("stop", "length")
        ours = expected_answer(prompt, tokens, request.stops)
        if self.steady:
            truth = answer(prompt, request.max_tokens, request.stops)
            if truth.tokens[: len(tokens)] != tokens:
                raise Violation(f"a client has {tokens}, the target generates {truth.tokens}")
            if whole and tokens != truth.tokens:
                raise Violation(f"an answer ended ({client.reason}) with {tokens} instead of {truth.tokens}")
        if not ours.text.startswith(client.text) or (client.reason and ours.text != client.text):
            raise Violation(f"a client has the text {client.text!r} for {ours.text!r}")
        if whole and client.reason != ("stop" if ours.stopped else "length"):
            raise Violation(f"an answer of {tokens} ended with {client.reason}")
        if client.reason == "length" and len(tokens) != request.max_tokens:
            raise Violation(f"an answer ended after {len(tokens)} tokens of {request.max_tokens}")

    def _check_end(self, client: Client) -> None:
        session = client.session or (client.request.session if client.request is not None else "")
        why = client.reason or client.error
        fine = {
            "": True,
            "stop": True,
            "length": True,
            "cancelled": session in self.cancelled,
            "abandoned": session in self.lapsed,
            "Superseded": not self._alone(client) or self._gone(session),
            "Busy": client.request is not None and bool(client.request.session),
            "NotFound": session in self.lapsed or session in self.redis.hurt or not session,
            "Conflict": session in self.redis.hurt or (not session and bool(self.redis.hurt)),
            "InvalidRequest": any(words in client.details for words in MOVED_ON),
        }
        if not fine.get(why, False):
            raise Violation(f"a client of session {session} received {why} ({client.details})")

    def _check_cancelled(self, canceller: Canceller) -> None:
        session = self.redis.store.sessions.get(canceller.session)
        if session is None or canceller.session in self.redis.lost:
            return
        record = session.record
        if record.generation == canceller.generation and record.running:
            raise Violation(f"generation {record.generation} of {canceller.session} was cancelled and runs")

    def _check_left(self) -> None:
        for verifier in self.verifiers:
            verifier.expire_waiting()
        while events := self.events():
            self.happen(events[0])
        left = [f"{router.name}: {task}" for router in self.routers for task in router.loop.tasks]
        left += [f"{router.name} runs {name}" for router in self.routers for name in router.inference.calls.running]
        left += [f"{verifier.name} serves {name}" for verifier in self.verifiers for name in verifier.sessions]
        left += [f"{drafter.name} drafts {name}" for drafter in self.drafters for name in drafter.attachments]
        if left:
            raise Violation(f"something is left: {left}")

    def _alone(self, client: Client) -> bool:
        """Return whether no client could have taken over what this client reads, itself included."""
        others = [other for other in self.clients if other is not client and other.session in ("", client.session)]
        return client.calls == 1 and not others and client.session not in self.cancelled

    def _tries_again(self, client: Client) -> bool:
        """Return whether a patient user has reason to ask once more after an error."""
        if client.error in ("NotFound", "Conflict"):
            return client.session in self.redis.hurt - self.lapsed and not self._gone(client.session)
        return client.error in ("Superseded", "Busy")

    def _same(self, client: Client, other: Client) -> bool:
        return other.request is not None and (other.session, other.generation) == (client.session, client.generation)

    def _gone(self, session: str) -> bool:
        """Return whether tokens of a session were lost for good."""
        return self.redis.lost.get(session, "?") == ""

    def _owned_by(self, name: str, router: Router) -> bool:
        """Return whether a router owns a session, and has all of it in its memory."""
        generation = router.inference.calls.running.get(name)
        record = self.redis.store.sessions[name].record if name in self.redis.store.sessions else None
        return generation is not None and record is not None and record.running and generation.epoch == record.epoch

    # Where everything is.

    def _router(self, index: int) -> Router:
        self._lives += 1
        name = f"router{index}.{self._lives}"
        workers = [
            Worker(f"verifier{n}", "verifier", "", MODEL.name, MODEL.digest, VOCABULARY, 4096, 8, 0, 1)
            for n in range(VERIFIERS)
        ]

        def post(note: Note) -> None:
            self.notes += [(drafter, note) for drafter in range(DRAFTERS)]

        return Router(
            name, self.clock, self.redis, MODEL, CONFIG, Fleet(workers, partial(self._dial_verifier, name), post)
        )

    def _verifier(self, index: int) -> Verifier:
        self._lives += 1
        salt = 0 if self.steady else self._lives
        return self.kinds.verifier(f"verifier{index}", partial(choice, salt=salt))

    def _drafter(self, index: int) -> Drafter:
        self._lives += 1
        name = f"drafter{index}"
        return self.kinds.drafter(name, partial(self._dial_sink, name))

    def _dial_router(self, index: int, receive: Callable[[Any], None]) -> Link:
        router = self.routers[index]
        link = Link(f"client {router.name}", lambda message: router.receive(link, message), receive)
        self.links.append((link, "client", router.name))
        return link

    def _dial_verifier(self, router: str, worker: str, receive: Callable[[Any], None]) -> Link:
        verifier = self._named(worker)
        link = Link(f"{router} {worker}", lambda message: verifier.receive_from_router(link, message), receive)
        self.links.append((link, router, worker))
        return link

    def _dial_sink(self, drafter: str, worker: str, receive: Callable[[Any], None]) -> Link:
        verifier = self._named(worker)
        link = Link(f"{drafter} {worker}", lambda frame: verifier.receive_from_drafter(link, frame), receive)
        self.links.append((link, drafter, worker))
        return link

    def _named(self, name: str) -> Verifier:
        return next(verifier for verifier in self.verifiers if verifier.name == name)

    def _cut_all(self, name: str, notice: Notice) -> None:
        for link, caller, server in list(self.links):
            if caller == name:
                link.cut(caller="never", server=notice)
            elif server == name:
                link.cut(caller=notice, server="never")
