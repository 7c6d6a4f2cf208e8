"""The engine's contract beyond logits: what it refuses, what it reports, what it measures."""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.core.session.digest import tokenizer_digest
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.torch_layers.kv_cache import lazy_zeros
from tests.engine.conftest import Pair
from tests.engine.small_checkpoints import MODELS, prompt, random_tokens

GOOD = prompt(0, np.array([1, 2, 3]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (prompt(8, np.array([1])), "slot 8"),
        (prompt(-1, np.array([1])), "slot -1"),
        (prompt(0, np.array([], np.int64)), "no rows"),
        (prompt(0, np.array([131])), "vocabulary of 131"),
        (prompt(0, np.array([-1])), "vocabulary of 131"),
        (prompt(0, np.zeros(3, np.int64), 510), "510"),
        (prompt(0, np.array([1]), -1), "prefix -1"),
        (replace(GOOD, positions=np.array([1, 2])), "positions"),
        (replace(GOOD, positions=np.array([1, 2, 512])), "position"),
        (replace(GOOD, positions=np.array([-1, 2, 3])), "position"),
        (replace(GOOD, mask=np.ones((2, 3), np.bool_)), "mask"),
        (replace(GOOD, mask=np.ones((3, 2), np.bool_)), "mask"),
        (replace(GOOD, mask=np.zeros((3, 3), np.bool_)), "see itself"),
        (replace(GOOD, wanted=4), "wants 4"),
        (replace(GOOD, wanted=-1), "wants -1"),
    ],
)
def test_a_segment_that_does_not_fit_is_refused_by_name(small: Pair, bad: Segment, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        small[0].forward([prompt(1, np.array([1, 2])), bad])


def test_a_pass_needs_segments_of_different_slots(small: Pair) -> None:
    with pytest.raises(ValueError, match="at least one"):
        small[0].forward([])
    with pytest.raises(ValueError, match="share a slot"):
        small[0].forward([GOOD, GOOD])


def test_moves_out_of_range_are_refused_and_empty_ones_do_nothing(small: Pair) -> None:
    engine, _ = small
    engine.move(0, np.array([], np.int64), np.array([], np.int64))
    for source, destination in (([512], [0]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(ValueError, match=r"move|row outside"):
            engine.move(0, np.array(source), np.array(destination))
    with pytest.raises(ValueError, match="slot 8"):
        engine.move(8, np.array([0]), np.array([0]))


def test_a_copied_prefix_is_a_prefix(small: Pair) -> None:
    engine, _ = small
    random = np.random.default_rng(9)
    text = random_tokens(engine, random, 40)
    other = random_tokens(engine, random, 40)
    engine.forward([prompt(2, text, wanted=0), prompt(5, other, wanted=0)])
    engine.copy(2, 5, 30)
    expected = engine.forward([prompt(2, other[:5], 30)])
    assert (engine.forward([prompt(5, other[:5], 30)]) == expected).all()
    engine.forward([prompt(2, text, wanted=0), prompt(5, other, wanted=0)])
    engine.copy(2, 5, 0)
    engine.copy(5, 5, 40)
    probe = engine.forward([prompt(5, text[:1], 40)])
    engine.forward([prompt(6, other, wanted=0)])
    assert (engine.forward([prompt(6, text[:1], 40)]) == probe).all()


@pytest.mark.parametrize(
    ("arguments", "named"), [((8, 0, 1), "source: slot 8"), ((0, -1, 1), "target: slot -1"), ((0, 1, 513), "513 rows")]
)
def test_copies_out_of_range_are_refused(small: Pair, arguments: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        small[0].copy(*arguments)


def test_the_engine_describes_its_checkpoint(target: Pair) -> None:
    engine, reference = target
    assert (engine.vocabulary, engine.context, engine.rows, engine.slots) == (4096, 1024, 1280, 8)
    assert engine.parameters == reference.model.num_parameters()
    assert engine.eos_ids == (0,)
    assert engine.dtype == "float32"
    assert engine.numerics == ("invariant" if isinstance(engine, CpuEngine) else "fast")
    assert engine.tokenizer_digest == tokenizer_digest((MODELS / "target" / "tokenizer.json").read_bytes())


def test_costs_are_measured_for_fitting_passes_and_leave_other_sessions_alone(small: Pair) -> None:
    engine, _ = small
    before = engine.forward([GOOD])
    began = time.perf_counter()
    costs = engine.measure_costs([1, 8, 511, 512, 0])
    took = time.perf_counter() - began
    assert [count for count, _ in costs] == [1, 8, 511]
    one, _, most = (seconds for _, seconds in costs)
    assert 0.0 < one < most
    assert sum(seconds for _, seconds in costs) < took
    probe = prompt(0, np.array([4]), 3)
    after = engine.forward([probe])
    engine.forward([GOOD])
    assert (engine.forward([probe]) == after).all()
    assert (engine.forward([GOOD]) == before).all()


def test_costs_are_measured_in_the_time_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow model the smaller passes alone, once each; the first two in any case."""
    ran: list[int] = []

    class Slow:
        """A pass takes a second for each row."""

        compiles_sizes, treeless, rewinds, rows, slots, context = False, "", True, 600, 2, 512

        def _try(self, segment: Segment) -> None:
            ran.append(len(segment.tokens))

        def release(self, slot: int, rows: int) -> None:
            assert (slot, rows) == (1, 0)

    monkeypatch.setattr(time, "perf_counter", lambda: float(sum(ran)))
    sizes = [1, 2, 4, 8, 16]
    for within_s, expected in ((0, [1, 2]), (7, [1, 2, 4]), (10, [1, 2, 4, 1, 2]), (1000, 5 * sizes)):
        ran.clear()
        costs = CpuEngine.measure_costs(Slow(), sizes, within_s=within_s)  # type: ignore[arg-type]
        assert costs == [(count, count) for count in sorted({*expected})]
        assert ran == expected


def test_any_thread_may_run_a_pass_with_the_engines_threads(small: Pair) -> None:
    engine, _ = small
    expected, found = engine.forward([GOOD]), []

    def work() -> None:
        found.append(engine.forward([GOOD]))
        found.append(np.array(torch.get_num_threads()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (found[0] == expected).all()
    assert found[1] == 1


def test_kv_takes_memory_only_when_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lazy_zeros(8, 2, 64, 8, 2048, 64)  # 4 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_progress_rises_to_one() -> None:
    reported: list[float] = []
    CpuEngine.load(MODELS / "drafter", EngineSettings(dtype="bfloat16", slots=1, threads=1, progress=reported.append))
    assert reported == sorted(reported)
    assert reported[0] > 0.0
    assert reported[-1] == 1.0
