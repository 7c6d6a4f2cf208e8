"""A short run of the tool, and what it measures with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from tests.chaos.faults import SCENARIOS, read, scenario, write
from tests.chaos.injector import FaultInjector, FaultOutcome, recovery, went_on
from tests.chaos.load import Case, Load, Received, Tally, cases
from tests.chaos.report import last_line, missed, rows, status, table
from tests.chaos.servers import ROLES, Servers, Shape

SESSIONS = 4
CONTEXT = 1000
CASE = Case(0, (1, 2), 0.0, 4)


@pytest.mark.asyncio
async def test_one_kill_of_each_role_costs_no_session_a_token() -> None:
    lines: list[str] = []
    async with (
        Servers(Shape(slots=SESSIONS), lambda name, line: print(name, line)) as servers,
        Load(servers, cases(SESSIONS, CONTEXT), seed=5, leaving=0.1) as load,
    ):
        await load.undisturbed()
        load.begin()
        await load.more(50, 10.0)
        injector = FaultInjector(servers, load, lines.append)
        await injector.run([replace(fault, which="busiest") for fault in scenario("kill", 5, 1)], within_s=60.0)
        await load.end()
    print("\n".join(lines), table(injector.done, load.tally), sep="\n")
    assert not load.tally.wrong
    assert load.tally.answers >= SESSIONS
    assert {outcome.fault.role for outcome in injector.done} == set(ROLES)
    assert all(outcome.sessions and not outcome.stranded for outcome in injector.done)
    assert missed(injector.done) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_decides_which_faults_strike_and_when(name: str, tmp_path: Path) -> None:
    faults = scenario(name, 7, 3)
    assert faults == scenario(name, 7, 3)
    assert faults != scenario(name, 8, 3)
    write(faults, tmp_path / "faults")
    assert read(tmp_path / "faults") == faults


def test_an_unknown_chaos_scenario_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no 'flood'"):
        scenario("flood", 7, 1)
    (tmp_path / "faults").write_text('{"kind": "kill"}\n')
    with pytest.raises(ConfigError, match="is not what `--write` writes"):
        read(tmp_path / "faults")


def test_recovery_ends_with_the_silence_that_the_fault_began() -> None:
    def received(*times: float) -> Received:
        return Received(CASE, "s", times=list(times))

    assert recovery(received(9.0, 10.05, 12.0, 12.1, 15.0), 10.0) == pytest.approx(2.0)  # one token was under way
    assert recovery(received(9.0, 10.4, 14.0), 10.0) == pytest.approx(0.4)  # a later silence is not of this fault
    assert recovery(received(9.0), 10.0) is None
    assert not went_on(received(9.0, 10.05), 10.0)
    assert went_on(received(9.0, 10.4), 10.0)


def test_every_kind_of_wrong_answer_is_counted_under_its_own_name() -> None:
    whole = Received(CASE, "s", [5, 6, 7, 8], [1.0, 1.0, 1e-5, 1.0])

    def judged(**changes: object) -> Tally:
        tally = Tally()
        tally.judge(replace(whole, **changes), whole)  # type: ignore[arg-type]
        return tally

    assert not judged().wrong
    assert not judged(tokens=[5], left=True).wrong
    assert judged(tokens=[5]).lost == 3
    assert judged(skipped=2).lost == 2
    assert judged(repeated=1).repeated == 1
    assert judged(tokens=[5, 9, 7, 8]).changed == 1
    near = judged(tokens=[5, 6, 9, 9])
    assert (near.near_ties, near.changed, near.wrong) == (1, 0, False)


def test_the_table_shows_which_bounds_were_kept_and_the_last_line_is_for_scripts() -> None:
    def outcome(name: str, *recoveries: float, stranded: int = 0) -> FaultOutcome:
        fault = scenario(name, 1, 1)[0]
        return FaultOutcome(fault, "x", 0.0, [], recoveries=list(recoveries), stranded=stranded)

    done = [outcome("kill-router", 0.5, 1.25), outcome("kill-drafter", 0.75), outcome("flap", 9.0)]
    assert [(row.what, row.met) for row in rows(done)] == [
        ("kill router", True),
        ("kill drafter", False),
        ("flap redis", None),
    ]
    assert missed(done) == ["bound not kept: kill drafter: p99 0.75 s of 0.5 s allowed, stranded 0"]
    assert [status(done[:1], Tally()), status(done, Tally()), status(done[:1], Tally(lost=1))] == [0, 1, 1]
    for stranded in (outcome("kill-router", 0.5, stranded=1), outcome("kill-router", stranded=1)):
        assert rows([stranded])[0].met is False
        assert status([stranded], Tally()) == 1
    tally = Tally(lost=1, changed=2)
    assert "not met" in table(done, tally)
    assert last_line(done, tally) == "chaos: kills=2 lost=1 repeated=0 changed=2 worst_recovery_s=1.25"
