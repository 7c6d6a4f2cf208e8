"""A grammar's process is all that a caller's grammar can harm."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.core.sampling.grammar import GrammarDelayed
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.grammar import compiler as compilers
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.connection import OnAnswer
from outrider.grammar.place import MAX_BEHIND, STEP_S, GrammarPlace, Patience
from tests.grammar.test_compiler import EOS, FOLDER, VOCABULARY, ids
from tests.hostile.attacks import grammar_bombs
from tests.hostile.callers import children, command_of

MOST = (("one", 6), ("two", 3))  # of twelve processes that a tenant may have, one after the other
WORDS = Grammar("regex", "[a-z ]+")
SLOW = Grammar("lark", 'start: "a" X{2}\nX: "the cat sat on a mat. "{400}')  # what follows the "a" takes a while


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(FOLDER, VOCABULARY, [EOS])
    yield compiler
    compiler.close()


def kill(pid: int) -> None:
    """Kill a process, and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """Return whether a process has ended, and closed its sockets."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return True


def take_longer(place: GrammarPlace, seconds: float) -> None:
    """From now on each answer of a place's process has taken `seconds` more of the processor."""
    send = place.connection.send

    def send_slowly(on_answer: OnAnswer, operation: str, *inputs: object) -> None:
        send(lambda answer: on_answer(answer._replace(seconds=seconds)), operation, *inputs)

    place.connection.send = send_slowly  # type: ignore[method-assign]


def grammar_processes() -> dict[int, list[int]]:
    """The first processes that this one has, each with those that it has forked."""
    return {pid: children(pid) for pid in children(os.getpid()) if "grammar.child" in command_of(pid)}


@pytest.mark.parametrize("bomb", range(9))
def test_an_oversized_grammar_is_refused_and_others_are_followed(compiler: GrammarCompiler, bomb: int) -> None:
    words = compiler.start(WORDS, tenant="good")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    kind, text = grammar_bombs(0)[bomb]
    try:
        state = compiler.start(Grammar(kind, text), tenant="bad")
        for _ in range(60):
            state.extend([int(np.flatnonzero(state.allowed(()))[-1])])
    except InvalidRequest:
        pass
    except GrammarDelayed:
        assert isinstance(state.failure, InvalidRequest)
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
    words.extend(ids("ab"))
    assert words.allowed(()).any()
    if bomb < 4 or bomb == 5:
        again = time.monotonic()
        with pytest.raises(InvalidRequest):
            compiler.start(Grammar(kind, text), tenant="bad")
        assert time.monotonic() - again < 0.1  # it is known


def test_a_process_that_is_killed_is_replaced_and_its_sessions_move(compiler: GrammarCompiler) -> None:
    killed, other = compiler.start(WORDS, tenant="one"), compiler.start(WORDS, tenant="other")
    assert [state.allowed(()).any() for state in (killed, other)] == [True, True]
    kill(killed.connection.pid)
    with pytest.raises(GrammarDelayed):
        killed.allowed([5, 6])
    assert isinstance(killed.failure, Unavailable)
    assert other.allowed([]).any()
    assert compiler.start(WORDS, tenant="one").allowed(()).any()


def both_serve(forked: list[int]) -> bool:
    """Return whether the process of a grammar and that for the next one have left the first one's socket, their 0."""
    places = [f"/proc/{pid}/fd/0" for pid in forked]
    return len(forked) == 2 and not any("socket:" in it for it in map(os.path.realpath, places))


def test_the_first_process_is_replaced(compiler: GrammarCompiler) -> None:
    before = grammar_processes().keys()
    state = compiler.start(WORDS)
    (first,) = grammar_processes().keys() - before
    deadline = time.monotonic() + 10
    while not both_serve(grammar_processes()[first]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill(first)
    for number in range(3):  # one was there already
        assert compiler.start(Grammar("regex", f"[ab]{{{number + 1}}}")).allowed(()).any()
    assert state.allowed(ids("a")).any()


def test_no_process_outlives_its_compiler(compiler: GrammarCompiler) -> None:
    before = grammar_processes().keys()
    state = compiler.start(WORDS)
    found = {pid: forked for pid, forked in grammar_processes().items() if pid not in before}
    assert sum(map(len, found.values())) == 2  # one that follows the grammar, and one for the next
    compiler.close()
    deadline = time.monotonic() + 10
    while any(map(command_of, [*found, *(pid for forked in found.values() for pid in forked)])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(GrammarDelayed):
        state.allowed([5])


def test_each_tenant_compiles_a_grammar_anew(compiler: GrammarCompiler) -> None:
    compiler.start(WORDS, tenant="one")
    assert compiler.usage.processes == 1
    compiler.start(WORDS, tenant="one")
    assert compiler.usage.processes == 1
    compiler.start(WORDS, tenant="other")
    assert compiler.usage.processes == 2


def test_kept_compiler_processes_are_bounded_by_bytes_and_number(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "KEPT_PROCESSES", 5)
    for number in range(8):
        compiler.start(Grammar("regex", f"[a-z]{{{number + 1}}}")).close()
    assert compiler.usage.processes == 5
    each = compiler.usage.bytes // 5
    monkeypatch.setattr(compilers, "KEPT_BYTES", 3 * each)
    compiler.start(Grammar("regex", "x"))
    assert compiler.usage.bytes <= 4.5 * each


def test_a_tenant_takes_its_share_and_leaves_the_rest(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_PROCESSES", 8)
    held = [compiler.start(Grammar("regex", f"[a-z]{{{number + 1}}}"), tenant="bad") for number in range(4)]
    with pytest.raises(Overloaded):
        compiler.start(Grammar("regex", "x"), tenant="bad")
    assert compiler.start(WORDS, tenant="good").allowed(()).any()
    held.pop().close()
    compiler.start(Grammar("regex", "x"), tenant="bad")


async def test_a_tenant_s_grammars_are_compiled_one_after_the_other(compiler: GrammarCompiler) -> None:
    await compiler.check(WORDS, "bad")
    bombs = [Grammar("json_schema", f'{{"type": "integer", "multipleOf": {2_999_999 + 2 * at}}}') for at in range(70)]
    checks = [asyncio.create_task(compiler.check(bomb, "bad")) for bomb in bombs]
    await asyncio.sleep(0)
    began = time.monotonic()
    await compiler.check(WORDS, "good")
    assert time.monotonic() - began < 5
    assert sum(check.done() and isinstance(check.exception(), Overloaded) for check in checks) == 6
    assert sum(not check.done() for check in checks) > 50
    for check in checks:
        check.cancel()
    await asyncio.gather(*checks, return_exceptions=True)


def test_a_slow_session_is_delayed_once_and_fails_the_second_time(
    compiler: GrammarCompiler,
) -> None:
    state = compiler.start(WORDS)
    state.allowed(())
    take_longer(state, 0.6 * STEP_S)
    state.allowed(ids("a"))
    assert (state.slow, state.failure) == (False, None)
    state.allowed(ids("b"))
    state.allowed(ids("c"))
    assert (state.slow, state.failure) == (True, None)
    state.extend(ids("a"))
    state.connection.wait(10, lambda: state.failure is not None)
    assert isinstance(state.failure, InvalidRequest)
    with pytest.raises(GrammarDelayed):
        state.allowed([5])


def test_an_event_loop_waits_for_a_while_and_at_most_half_of_the_time() -> None:
    now = 0.0
    patience = Patience(lambda: now)
    waited = 0.0
    for _ in range(1000):
        now += 0.001
        waiting = patience.left()
        assert waiting <= Patience.ONCE_S
        now += waiting
        waited += waiting
        patience.spend(waiting)
    assert waited <= Patience.MOST_S + Patience.SHARE * now


def test_a_late_mask_is_asked_for_again_or_allows_all_tokens() -> None:
    patience = Patience(lambda: 0.0)
    patience.spend(1.0)
    compiler = GrammarCompiler(FOLDER, VOCABULARY, [EOS], patience=patience)
    strict = compiler.start(WORDS)
    os.kill(strict.connection.pid, signal.SIGSTOP)
    try:
        with pytest.raises(GrammarDelayed):
            strict.allowed([5])
        assert (strict.slow, strict.pending, strict.failure) == (True, True, None)
        lenient = compiler.known(WORDS)
        assert lenient is not None
        assert lenient.allowed([5]).all()
        assert [*lenient.first_allowed([5], [1, 2, 3], 2)] == [0, 1]
    finally:
        os.kill(strict.connection.pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while strict.pending:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    compiler.close()


@pytest.mark.parametrize("grammar", [SLOW, Grammar("regex", "once upon a time(, long ago)?")], ids=["long", "short"])
def test_a_grammar_state_does_not_depend_on_how_the_answer_arrived(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """A forced text is divided once; a session that moves finds the same division in its midst."""
    state, answer = compiler.start(grammar), list[int]()
    for _ in range(12):
        mask = state.allowed(())
        resumed = compiler.start(grammar, answer)
        assert (resumed.allowed(()) == mask).all()
        assert resumed.forced() == state.forced()
        if len(forced := state.forced()) > 2:
            assert np.flatnonzero(state.allowed(forced[:2])).tolist() == [forced[2]]
        token = int(np.flatnonzero(mask)[-1])
        if token == EOS:
            break
        state.extend([token])
        answer.append(token)
    assert len(answer) > 3


def test_a_long_answer_that_is_resumed_counts_for_no_step(compiler: GrammarCompiler) -> None:
    answer = ids("once upon a time " * 1000)
    resumed, followed = compiler.start(WORDS, answer), compiler.start(WORDS)
    for start in range(0, len(answer), 100):
        followed.extend(answer[start : start + 100])
        followed.forced()
    for path in ((), ids("a")):
        assert (resumed.allowed(path) == followed.allowed(path)).all()
        assert resumed.allowed(path).any()
    assert (resumed.slow, resumed.failure) == (False, None)


def test_a_drafter_s_grammar_that_falls_behind_its_text_is_given_up(compiler: GrammarCompiler) -> None:
    place = compiler.start(WORDS)
    os.kill(place.connection.pid, signal.SIGSTOP)
    try:
        for _ in range(MAX_BEHIND + 1):
            place.extend(ids("a"))
        assert "takes too much time to follow" in str(place.failure)
    finally:
        os.kill(place.connection.pid, signal.SIGCONT)


def test_full_tenants_leave_capacity_for_another_one(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_PROCESSES", 12)
    grammars = [Grammar("regex", f"[a-z]{{{number + 1}}}") for number in range(12)]
    held = {tenant: [compiler.start(grammar, tenant=tenant) for grammar in grammars[:most]] for tenant, most in MOST}
    for tenant in held:
        with pytest.raises(Overloaded):
            compiler.start(grammars[-1], tenant=tenant)
    assert compiler.start(WORDS, tenant="good").allowed(()).any()


def test_a_remembered_refusal_keeps_no_object_of_its_callers(compiler: GrammarCompiler) -> None:
    class Request:
        """What a caller has in hand."""

    def ask() -> weakref.ref[Request]:
        request = Request()
        with pytest.raises(InvalidRequest, match="grammar: "):
            compiler.start(Grammar("regex", "(never closed"))
        return weakref.ref(request)

    for _ in range(2):  # what is said anew, and what was kept
        kept = ask()
        gc.collect()
        assert kept() is None
