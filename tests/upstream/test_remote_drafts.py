"""Drafters of an engine that is not ours: its text stays its own, whatever becomes of them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.core.session.contract import Contract
from outrider.rpc.certificates import make
from outrider.rpc.tls import Tls
from outrider.upstream.remote_drafts import RemoteDrafts, UpstreamSettings
from tests.engine.small_checkpoints import MODELS, make_checkpoint
from tests.upstream.foreign_engine import LONG, PROMPT, ForeignEngine, drafter, wait_until

TARGET = MODELS / "target"


@pytest.fixture(scope="module")
def engine() -> ForeignEngine:
    return ForeignEngine()


def contract(seed: int, temperature: float) -> Contract:
    return Contract(seed=seed, max_tokens=LONG, temperature=temperature)


def settings(address: str, **more: Any) -> UpstreamSettings:
    """The settings of an upstream that takes all drafts, whatever they cost."""
    return UpstreamSettings([address], TARGET, adaptive=False, **more)


@pytest.mark.parametrize(("temperature", "tokens_a_step"), [(0.0, 1.5), (0.7, 1.2), (1.0, 1.1)])
def test_texts_are_the_engines_own_and_take_fewer_steps(
    temperature: float, tokens_a_step: float, engine: ForeignEngine
) -> None:
    plain = [engine.text(contract(seed, temperature), 60) for seed in range(4)]
    with drafter() as (address, _), RemoteDrafts(settings(address, wait_ms=200)) as drafts:
        wait_until(lambda: drafts.drafters)
        before = engine.steps
        assert [engine.text(contract(seed, temperature), 60, drafts) for seed in range(4)] == plain
        assert 4 * 60 / (engine.steps - before) > tokens_a_step
        assert drafts.rows == []
        assert 0 < drafts.counts.accepted <= drafts.counts.drafted


def test_without_any_drafter_there_are_no_drafts(engine: ForeignEngine) -> None:
    plain = engine.text(contract(1, 1.0), 20)
    with RemoteDrafts(UpstreamSettings(["127.0.0.1:9"], TARGET)) as drafts:
        assert engine.text(contract(1, 1.0), 20, drafts) == plain
        assert drafts.counts.drafted == 0
        assert drafts.drafters == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_drafter_that_dies_or_freezes_costs_its_drafts_alone(number: int, engine: ForeignEngine) -> None:
    plain = engine.text(contract(3, 0.0), 120)
    with drafter() as (address, process), RemoteDrafts(settings(address, wait_ms=5)) as drafts:
        wait_until(lambda: drafts.drafters)
        assert engine.text(contract(3, 0.0), 120, drafts) == plain
        drafted = drafts.counts.drafted
        assert drafted
        process.send_signal(number)
        assert engine.text(contract(3, 0.0), 120, drafts) == plain
        wait_until(lambda: not drafts.drafters)
        assert engine.text(contract(3, 0.0), 60, drafts) == plain[:60]


def test_a_drafter_that_comes_later_drafts_for_a_row_that_is_open(engine: ForeignEngine) -> None:
    with drafter() as (address, _):
        pass
    port = address.rpartition(":")[2]
    with RemoteDrafts(settings(address)) as drafts:
        drafts.open("late", PROMPT, contract(1, 0.0))
        assert drafts.step([("late", [])]) == [[]]
        with drafter("--listen", f"127.0.0.1:{port}"):
            wait_until(lambda: drafts.step([("late", [])])[0])


def test_a_drafter_with_another_tokenizer_does_not_draft(tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path)
    with drafter(model=other) as (address, _), RemoteDrafts(settings(address)) as drafts:
        time.sleep(1.5)
        assert drafts.drafters == 0


def test_drafters_and_upstream_prove_their_roles(tmp_path: Path) -> None:
    make(tmp_path, ["localhost"])

    def files(role: str) -> list[Path]:
        return [tmp_path / "ca.pem", tmp_path / f"{role}.pem", tmp_path / f"{role}.key"]

    flags = [str(it) for pair in zip(("--ca", "--cert", "--key"), files("drafter"), strict=True) for it in pair]
    with drafter(*flags) as (address, _):
        for role, drafted in (("upstream", True), ("client", False), (None, False)):
            tls = None if role is None else Tls.read(*files(role))
            with RemoteDrafts(settings(address, tls=tls)) as drafts:
                drafts.open("row", PROMPT, contract(1, 0.0))
                if drafted:
                    wait_until(lambda: drafts.step([("row", [])])[0])
                else:
                    time.sleep(1.5)
                    assert drafts.step([("row", [])]) == [[]]


def test_bad_calls_give_no_drafts_and_no_errors() -> None:
    with drafter() as (address, _), RemoteDrafts(settings(address)) as drafts:
        assert drafts.step([]) == []
        assert drafts.step([("unknown", [1, 2])]) == [[]]
        drafts.open("empty", [], contract(1, 0.0))
        assert drafts.step([("empty", [])]) == [[]]
        drafts.close("unknown")
        drafts.open("row", PROMPT, contract(1, 0.0))
        assert drafts.step([("row", [10**9])]) == [[]]
        assert drafts.step([("row", None)]) == [[]]  # type: ignore[list-item]
        assert len(drafts.step([("row", [5]), ("row", [6])])) == 2
        drafts.open("row", PROMPT, contract(1, 0.0))
        wait_until(lambda: drafts.step([("row", [])])[0])
        assert len(drafts.step([("row", [])], most=[2])[0]) <= 2
        assert drafts.step([("row", [])], most=[0]) == [[]]


def test_an_engine_may_change_its_lists_after_a_call() -> None:
    with drafter() as (address, _), RemoteDrafts(settings(address)) as drafts:
        wait_until(lambda: drafts.drafters)
        text, chosen = [*PROMPT], [7]
        drafts.open("row", text, contract(1, 0.0))
        text.clear()
        drafts.step([("row", chosen)])
        chosen.clear()
        wait_until(lambda: any(drafts.step([("row", [])])))


def test_a_thousand_short_rows_leave_nothing_behind() -> None:
    with drafter() as (address, _), RemoteDrafts(settings(address, idle_s=0.5)) as drafts:
        wait_until(lambda: drafts.drafters)
        for number in range(1000):
            drafts.open(f"row {number}", PROMPT, contract(number, 1.0))
            drafts.step([(f"row {number}", [])])
            if number % 2:
                drafts.close(f"row {number}")
        wait_until(lambda: not drafts.rows)
        drafts.open("last", PROMPT, contract(1, 0.0))
        wait_until(lambda: drafts.step([("last", [])])[0])
        drafts.close("last")
        assert drafts.rows == []


def test_texts_stay_the_same_while_control_tries_what_pays(engine: ForeignEngine) -> None:
    plain = engine.text(contract(5, 0.0), 300)
    with drafter() as (address, _), RemoteDrafts(UpstreamSettings([address], TARGET)) as drafts:
        wait_until(lambda: drafts.drafters)
        assert engine.text(contract(5, 0.0), 300, drafts) == plain
        assert drafts.counts.drafted


def test_drafters_that_announce_themselves_are_found(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    found = UpstreamSettings([], TARGET, redis=redis_url, adaptive=False)
    with drafter() as (_, process), RemoteDrafts(found) as drafts:
        drafts.open("row", PROMPT, contract(1, 0.0))
        wait_until(lambda: drafts.step([("row", [])])[0])
        process.terminate()
        wait_until(lambda: not drafts.drafters)


def test_engines_share_a_drafters_slots() -> None:
    with (
        drafter("--slots", "4") as (address, _),
        RemoteDrafts(settings(address)) as early,
        RemoteDrafts(settings(address)) as late,
    ):
        for number in range(4):
            early.open(f"row {number}", PROMPT, contract(number, 0.0))
        wait_until(lambda: drafted(early, 4) == 4)
        for number in range(3):
            late.open(f"row {number}", PROMPT, contract(number, 0.0))
        wait_until(lambda: drafted(late, 3) == 2)
        for number in range(4):
            early.close(f"row {number}")
        wait_until(lambda: drafted(late, 3) == 3)


def drafted(drafts: RemoteDrafts, rows: int) -> int:
    """Rows that have drafts."""
    return sum(map(bool, drafts.step([(f"row {number}", []) for number in range(rows)])))
