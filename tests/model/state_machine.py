"""The state machine of a cluster: rules that Hypothesis runs in any order."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.model.language import WORDS
from tests.model.requests import ModelRequest
from tests.model.world import DRAFTERS, ROUTERS, VERIFIERS, Kinds, World

MOST_CLIENTS = 4

seeds = st.integers(0, 2**16)
routers = st.integers(0, ROUTERS - 1)
notices = st.sampled_from(("now", "later"))


class ClusterMachine(RuleBasedStateMachine):
    """A world, and everything that clients and faults do to it. Ends with all faults over and everything settled."""

    kinds = Kinds()
    steady = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.kinds, steady=self.steady)
        self.requests = 0

    def teardown(self) -> None:
        try:
            self.world.settle()
        finally:
            self.world.close()

    @initialize(
        words=st.integers(1, 4),
        stop=st.sampled_from(((), (), ("x x",), ("é",))),
        router=routers,
        count=st.integers(0, 30),
        seed=seeds,
    )
    def begin(self, words: int, stop: tuple[str, ...], router: int, count: int, seed: int) -> None:
        self.ask(words, stop, router)
        self.world.burst(seed, count)

    @rule(seed=seeds, count=st.integers(1, 25))
    def go_on(self, seed: int, count: int) -> None:
        self.world.burst(seed, count)

    # People.

    @precondition(lambda self: len(self.world.clients) < MOST_CLIENTS)
    @rule(words=st.integers(1, 4), stop=st.sampled_from(((), ("xé",))), router=routers)
    def ask(self, words: int, stop: tuple[str, ...], router: int) -> None:
        self.requests += 1
        prompt = tuple(WORDS[(self.requests + index) % len(WORDS)] for index in range(words))
        self.world.ask(ModelRequest(f"key {self.requests}", prompt, stops=stop), router)

    @precondition(lambda self: self.sessions() and len(self.world.clients) < MOST_CLIENTS)
    @rule(pick=seeds, words=st.integers(1, 3), most=st.integers(1, 8), router=routers)
    def take_a_turn(self, pick: int, words: int, most: int, router: int) -> None:
        self.requests += 1
        session, _ = self.pick(pick)
        prompt = tuple(WORDS[(pick + self.requests + index) % len(WORDS)] for index in range(words))
        self.world.ask(ModelRequest(f"key {self.requests}", prompt, max_tokens=most, session=session), router)

    @precondition(lambda self: self.sessions() and len(self.world.clients) < MOST_CLIENTS)
    @rule(pick=seeds, router=routers)
    def read_from_the_start(self, pick: int, router: int) -> None:
        self.world.read(*self.pick(pick), router)

    @rule(pick=seeds, router=routers)
    def hang_up(self, pick: int, router: int) -> None:
        client = self.world.clients[pick % len(self.world.clients)]
        client.hang_up()
        if client.idle:
            client.call(router)

    @precondition(lambda self: self.sessions() and len(self.world.cancelled) < 1)
    @rule(pick=seeds, router=routers, rarely=st.integers(0, 3))
    def cancel(self, pick: int, router: int, rarely: int) -> None:
        if not rarely:
            self.world.cancel(*self.pick(pick), router)

    # Faults.

    @precondition(lambda self: self.world.links)
    @rule(pick=seeds, caller=notices, server=notices)
    def cut(self, pick: int, caller: Any, server: Any) -> None:
        self.world.cut(pick % len(self.world.links), caller, server)

    @rule(pick=seeds)
    def hold(self, pick: int) -> None:
        self.world.hold(pick)

    @rule()
    def let_go(self) -> None:
        self.world.let_go()

    @rule()
    def notice(self) -> None:
        self.world.notice()

    @rule(index=routers, notice=notices)
    def crash_router(self, index: int, notice: Any) -> None:
        self.world.crash_router(index, notice)

    @rule(index=st.integers(0, VERIFIERS - 1), notice=notices)
    def crash_verifier(self, index: int, notice: Any) -> None:
        self.world.crash_verifier(index, notice)

    @rule(index=st.integers(0, DRAFTERS - 1), notice=notices)
    def crash_drafter(self, index: int, notice: Any) -> None:
        self.world.crash_drafter(index, notice)

    @precondition(lambda self: self.world.redis.requests)
    @rule(pick=seeds, outcome=st.sampled_from(("lost", "refused", "late")))
    def answer_badly(self, pick: int, outcome: Any) -> None:
        requests = self.world.redis.requests
        self.world.happen(lambda: self.world.answer(requests[pick % len(requests)], outcome))

    @precondition(lambda self: self.world.redis.late)
    @rule(pick=seeds)
    def arrive_late(self, pick: int) -> None:
        late = self.world.redis.late
        self.world.happen(lambda: self.world.redis.run_late(late[pick % len(late)]))

    @rule(away=st.booleans())
    def redis_goes_or_comes(self, away: bool) -> None:
        self.world.redis.away = away

    @rule()
    def save(self) -> None:
        self.world.redis.save()

    @precondition(lambda self: self.world.redis.can_lose)
    @rule()
    def lose(self) -> None:
        self.world.lose()

    @rule(seconds=st.sampled_from((0.1, 1.0, 6.0, 11.0, 70.0)))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: any(verifier.sessions for verifier in self.world.verifiers))
    @rule(pick=seeds)
    def lose_patience(self, pick: int) -> None:
        serving = [verifier for verifier in self.world.verifiers if verifier.sessions]
        verifier = serving[pick % len(serving)]
        sessions = list(verifier.sessions.values())
        self.world.happen(lambda: verifier.give_up(sessions[pick % len(sessions)]))

    # Drafters.

    @precondition(lambda self: any(drafter.attachments for drafter in self.world.drafters))
    @rule(seed=seeds, what=st.sampled_from(("lie", "replay", "grow")))
    def draft(self, seed: int, what: str) -> None:
        chance = random.Random(seed)
        drafter = chance.choice([drafter for drafter in self.world.drafters if drafter.attachments])
        if what == "lie":
            drafter.send_garbage(chance)
        elif what == "replay" and drafter.sent:
            drafter.replay(chance)
        elif what == "grow" and drafter.drafts:
            drafter.grow(chance)

    def sessions(self) -> list[tuple[str, int]]:
        """Sessions that some client reads, with the generation that it reads."""
        return sorted({(client.session, client.generation) for client in self.world.clients if client.session})

    def pick(self, pick: int) -> tuple[str, int]:
        sessions = self.sessions()
        return sessions[pick % len(sessions)]
