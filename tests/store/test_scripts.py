"""The scripts in a real server and the reference in memory agree, whatever happens and however often."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.protocol import Origin
from outrider.errors import NotFound, OutriderError
from outrider.store.records import SessionRecord, SessionTurn, load
from outrider.store.redis.client import connect
from outrider.store.sessions import OwnedSession, Sessions
from tests.store.reference import Owned, State, Store

ID = "s"
KEYS = (f"outrider:{{{ID}}}:session", f"outrider:{{{ID}}}:log")
# Time passes in steps of 40 s and nothing ends within 10 s of a multiple of them, so that the time that the test itself
# takes on the server's clock decides nothing.
TICK_S = 40.0
TIMES = {"ttl_s": 1010.0, "lease_s": 110.0, "resume_ttl_s": 310.0}
SLACK_S = 9.0
FEW = st.sampled_from((0, 0, 0, 1, 2, 5))


def text(start: int, stop: int) -> list[int]:
    """Every owner's tokens: as with one contract, a position has one token whichever owner computes it."""
    return [position * 7 % 5 for position in range(start, stop)]


def logprobs(start: int, stop: int) -> bytes:
    return b"".join(bytes([position % 256]) * 3 for position in range(start, stop))


@dataclass
class Owner:
    """What a caller remembers: enough to go on and to restore."""

    epoch: int
    name: str
    length: int  # durable, as far as it knows
    record: SessionRecord  # when it became the owner
    have: int  # tokens in its memory

    @property
    def answer(self) -> int:
        return self.record.turn.answer_position if self.record.turn is not None else 0

    @property
    def with_logprobs(self) -> bool:
        return self.record.turn is not None and self.record.turn.contract.logprobs is not None


@dataclass
class Call:
    """One call on both sides, which can be repeated as it was."""

    real: Callable[[], Awaitable[Any]]
    reference: Callable[[], Any]


@dataclass
class Saved:
    """A moment of both sides, to go back to."""

    reference: State
    real: dict[str, tuple[bytes, int]]  # key -> dump, ms to live
    time: float


class Agreement(RuleBasedStateMachine):
    """Owners of one session, with repeated and late calls, and a server that may lose its last writes."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = connect(self.url)
        self.server = redis.Redis.from_url(self.url)  # for looking inside
        self.server.flushall()
        self.sessions = Sessions(self.client, **TIMES)
        self.time = 0.0
        self.store = Store(**TIMES, now=lambda: self.time)
        self.owners: list[Owner] = []
        self.calls: list[Call] = []
        self.moments: list[Saved] = []
        self.names = 0

    def teardown(self) -> None:
        self.server.close()
        self.run(self.client.aclose())
        self.runner.close()

    @initialize(alternatives=st.sampled_from((None, 1)))
    def first_turn(self, alternatives: int | None) -> None:
        self.create()
        self.begin(0, 0, 4, alternatives, "v1", False, False)

    def create(self) -> None:
        self.call(
            lambda: self.sessions.create(ID, "tenant", "model", b"\xffdigest"),
            lambda: self.store.create(ID, "tenant", "model", b"\xffdigest"),
        )

    @rule(
        stale=st.sampled_from((0,) * 9 + (1,)),
        wrong=st.sampled_from((0,) * 8 + (-1, 1)),
        tokens=st.integers(0, 3),
        alternatives=st.sampled_from((None, 1)),
        verifier=st.sampled_from(("", "v1", "v2")),
        end=st.booleans(),
        again=st.booleans(),
    )
    def begin(
        self, stale: int, wrong: int, tokens: int, alternatives: int | None, verifier: str, end: bool, again: bool
    ) -> None:
        if self.store.find(ID) is None:
            self.create()
        if end and self.owners:
            self.own_call(self.owners[-1], "finish", ("length", "usage 3"), {}, again)
        held, name = self.record(), self.name()
        start = max(0, held.length + wrong)
        answer = start + tokens
        contract = Contract(
            seed=2**64 - 1, max_tokens=99, temperature=0.1 + 0.2, stop_ids=(0, 3), logprobs=alternatives
        )
        turn = SessionTurn(contract, ("stop", "\0ü"), answer, 1_800_000_000.123456 if alternatives else None)
        arguments = (ID, held.epoch - stale, name, turn, start, text(start, answer), extend(EMPTY, text(0, answer)))
        options: dict[str, Any] = {"plan": Plan(version=1, depth=3), "verifier": verifier}
        self.remember(
            self.call(
                lambda: self.sessions.begin(*arguments, **options),
                lambda: self.store.begin(*arguments, **options),
                again,
            )
        )

    @rule(stale=st.sampled_from((0, 0, 0, 1)), again=st.booleans())
    def acquire(self, stale: int, again: bool) -> None:
        expected, name = self.record().epoch - stale, self.name()
        self.remember(
            self.call(
                lambda: self.sessions.acquire(ID, expected, name), lambda: self.store.acquire(ID, expected, name), again
            )
        )

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(),
        back=FEW,
        ahead=st.sampled_from((0, 0, 0, 0, 1)),
        fresh=st.integers(0, 4),
        drafters=st.sampled_from((None, ("d1",), ("d2", "d3"))),
        again=st.booleans(),
    )
    def append(
        self, data: Any, back: int, ahead: int, fresh: int, drafters: tuple[str, ...] | None, again: bool
    ) -> None:
        owner = self.owner(data)
        start = max(owner.answer, owner.have - back) + ahead
        stop = max(start, owner.have + fresh)
        self.own_call(
            owner,
            "append",
            (start, text(start, stop), extend(EMPTY, text(0, stop))),
            {
                "logprobs": logprobs(start, stop) if owner.with_logprobs else b"",
                "plan": Plan(version=stop, depth=2) if fresh else None,
                "verifier": "v3" if fresh == 4 else None,
                "origin": Origin(fresh, "a" * fresh, "int8") if fresh > 2 else None,
                "drafters": drafters,
            },
            again,
        )
        owner.have = max(owner.have, owner.length)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), fresh=st.integers(1, 4), again=st.booleans())
    def go_on(self, data: Any, fresh: int, again: bool) -> None:
        self.append(data, 0, 0, fresh, None, again)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def append_another_text(self, data: Any, tokens: int) -> None:
        owner, length = self.owner(data), self.record().length
        start = max(0, length - tokens)
        if start < length:
            other = [token + 1 for token in text(start, start + tokens)]
            self.own_call(owner, "append", (start, other, 1), {}, again=False, late=False)

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(),
        what=st.sampled_from((("renew",), ("release", "usage 1"), ("finish", "stop", "usage 2"))),
        discard=st.booleans(),
        again=st.booleans(),
    )
    def hold_or_end(self, data: Any, what: tuple[str, ...], discard: bool, again: bool) -> None:
        owner = self.owner(data)
        kept = (text(0, owner.answer),) if discard and what[0] == "finish" and owner.answer else ()
        self.own_call(owner, what[0], (*what[1:], *kept), {}, again)

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(),
        fewer=FEW,
        reason=st.sampled_from(("", "", "stop")),
        another_text=st.booleans(),
        again=st.booleans(),
    )
    def restore(self, data: Any, fewer: int, reason: str, another_text: bool, again: bool) -> None:
        owner = self.owner(data)
        have = max(owner.answer, owner.have - fewer)
        if owner.record.turn is None:
            return
        tokens = text(0, have)
        another_text = another_text and 0 < have <= self.record().length
        if another_text:
            tokens[0] += 1
        record = replace(owner.record, finished=reason, usage="restored")
        beside = logprobs(owner.answer, have) if owner.with_logprobs else b""
        self.own_call(owner, "restore", (record, tokens, beside), {}, again, late=not another_text)

    @rule(again=st.booleans(), what=st.sampled_from(("nothing",) * 10 + ("close", "lose everything")))
    def the_end(self, again: bool, what: str) -> None:
        if what == "close":
            self.call(lambda: self.sessions.close(ID), lambda: self.store.close(ID), again)
        elif what == "lose everything":
            self.store.sessions.clear()
            self.server.flushall()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_late_repetition_arrives(self, data: Any) -> None:
        self.agree(self.calls[-1 - data.draw(st.integers(0, min(12, len(self.calls) - 1)))])

    @rule(ticks=st.sampled_from((1, 1, 3, 6, 11, 26)))
    def time_passes(self, ticks: int) -> None:
        self.time += ticks * TICK_S
        self.age(ticks * TICK_S)

    @precondition(lambda self: self.moments)
    @rule(back=st.integers(1, 6))
    def the_server_loses_its_last_writes(self, back: int) -> None:
        moment = self.moments[-min(back, len(self.moments))]
        self.store.lose(moment.reference)
        self.go_back(moment)

    @invariant()
    def both_hold_the_same_and_it_is_sound(self) -> None:
        moment, record, now, ends = self.look()
        self.moments.append(moment)
        session = self.store.find(ID)
        if session is None or record is None:
            assert session is None
            assert not moment.real
            return
        wanted = session.record
        assert replace(record, lease=0.0, resumable=0.0) == replace(wanted, lease=0.0, resumable=0.0)
        for real, reference in ((record.lease, wanted.lease), (record.resumable, wanted.resumable)):
            assert (real == 0) == (reference == 0)
            assert real == 0 or abs((real - now) - (reference - self.time)) < SLACK_S
        assert ends == session.ends
        assert len(moment.real) == (1 if record.length == 0 else 2)
        for _, left in moment.real.values():
            assert abs(left / 1000 - (session.expires - self.time)) < SLACK_S
        if not record.closed:
            start = record.length * (len(self.moments) % 3) // 3
            log = self.run(self.sessions.read(ID, start))
            assert log == self.store.read(ID, start)
            assert list(log.tokens) == text(start, record.length)
            assert record.digest == extend(EMPTY, text(0, record.length))

    # Machinery.

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def whole() -> Any:
            return await awaitable

        return self.runner.get_loop().run_until_complete(whole())

    def name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def record(self) -> SessionRecord:
        try:
            return self.store.get(ID)
        except NotFound:
            return SessionRecord(ID, "", "", b"")

    def owner(self, data: Any) -> Owner:
        return self.owners[-1 - data.draw(st.sampled_from((0, 0, 0, 0, 0, 0, 1, 2))) % len(self.owners)]

    def remember(self, outcome: Any) -> None:
        if outcome is not None:
            epoch, name, length = outcome
            self.owners.append(Owner(epoch, name, length, self.store.get(ID), length))

    def own_call(
        self, owner: Owner, method: str, arguments: tuple[Any, ...], options: Any, again: bool, late: bool = True
    ) -> None:
        epoch, name, length = owner.epoch, owner.name, owner.length

        async def real() -> Any:
            owned = OwnedSession(self.sessions, ID, epoch, name, length)
            return await getattr(owned, method)(*arguments, **options), owned.epoch

        def reference() -> Any:
            owned = Owned(self.store, ID, epoch, name, length)
            return getattr(owned, method)(*arguments, **options), owned.epoch

        outcome = self.call(real, reference, again, late)
        if outcome is not None:
            owner.epoch = outcome[1]
            owner.length = max(length, outcome[0] or 0)
            if method == "restore":
                owner.length = len(arguments[1])

    def call(
        self, real: Callable[[], Awaitable[Any]], reference: Callable[[], Any], again: bool = False, late: bool = True
    ) -> Any:
        """One call, at once repeated if `again`, and repeated some time if `late`. Its result; None if refused."""
        call = Call(real, reference)
        if late:
            self.calls.append(call)
        outcome = self.agree(call)
        if again:
            before = self.store.saved()
            assert self.agree(call) == outcome or outcome is True  # `create` returns that it was there
            assert self.store.saved() == before
        return None if isinstance(outcome, type) else outcome

    def agree(self, call: Call) -> Any:
        try:
            real = self.run(call.real())
        except OutriderError as error:
            real = type(error)
        try:
            reference = call.reference()
        except OutriderError as error:
            reference = type(error)
        if isinstance(real, OwnedSession) and isinstance(reference, Owned):
            real = (real.epoch, real.owner, real._length)
            reference = (reference.epoch, reference.owner, reference.length)
        if isinstance(real, type):  # a subclass that only its raiser uses
            real = real.__mro__[real.__name__.startswith("_")]
        assert real == reference
        return real

    def age(self, seconds: float) -> None:
        """Lets time pass for what is in Redis."""
        moment, record, _, _ = self.look()
        with self.server.pipeline() as pipeline:
            if record is not None:
                for field, ends in (("lease", record.lease), ("resumable", record.resumable)):
                    if ends:
                        pipeline.hset(KEYS[0], field, str(round((ends - seconds) * 1000)))
            for key, (_, left) in moment.real.items():
                pipeline.pexpire(key, max(0, left - round(seconds * 1000)))
            pipeline.execute()

    def look(self) -> tuple[Saved, SessionRecord | None, float, dict[int, tuple[int, str]]]:
        """This moment, the record as Redis holds it, its clock, and the log's entries about generations' ends."""
        with self.server.pipeline() as pipeline:
            pipeline.hgetall(KEYS[0]).time().xrange(KEYS[1])
            for key in KEYS:
                pipeline.dump(key).pttl(key)
            fields, (seconds, micros), log, *dumped = pipeline.execute()
        real = {
            key: (blob, left)
            for key, blob, left in zip(KEYS, dumped[::2], dumped[1::2], strict=True)
            if blob is not None
        }
        record = load(ID, {name.decode(): value for name, value in fields.items()}) if fields else None
        ends = {}
        for name, entry in log:
            if b"finish" in entry:
                length, _, generation = name.decode().partition("-")
                ends[int(generation)] = (int(length), entry[b"finish"].decode())
        return Saved(self.store.saved(), real, self.time), record, seconds + micros / 1e6, ends

    def go_back(self, moment: Saved) -> None:
        self.server.flushall()
        for key, (blob, left) in moment.real.items():
            self.server.restore(key, left, blob)
        self.age(self.time - moment.time)


def test_the_scripts_agree_with_the_reference(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.store.redis.client.TIMEOUT_S", 30.0)  # a busy machine is no lost reply

    class Here(Agreement):
        url = redis_url

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=35,
            stateful_step_count=40,
            report_multiple_bugs=False,
            phases=set(Phase) - {Phase.explain},  # it traces every line
            suppress_health_check=list(HealthCheck),
        ),
    )
