"""The pass that a device begins by itself has the logits of the pass that the host would have run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outrider.core.sampling.noise import Draw, generation_base
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.following import FollowingPass
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import Logits
from outrider.engine.interface.settings import EngineSettings
from tests.engine.gpu.taped import DEVICE, Tapes, taped
from tests.engine.small_checkpoints import MODELS, prompt

SLOTS, HELD = 6, 100
BASES = [generation_base(seed, 0) for seed in range(SLOTS)]


@pytest.fixture(scope="module")
def engines() -> tuple[DeviceEngine, DeviceEngine, Tapes]:
    """One runs on, taped; the other one does not."""
    ours, theirs = (
        DeviceEngine.load(MODELS / "target", EngineSettings(device=DEVICE, dtype="float32", slots=SLOTS, rows=HELD))
        for _ in range(2)
    )
    taped(theirs)
    return ours, theirs, taped(ours)


def sampler_of(text: Sequence[int], vocabulary: int, **terms: Any) -> Sampler:
    return Sampler(Contract(max_tokens=HELD, **terms), vocabulary, [*text], len(text))


@dataclass
class Texts:
    """Texts that two engines decode."""

    engines: tuple[DeviceEngine, DeviceEngine, Tapes]
    draws: dict[int, Draw]  # by slot
    tokens: dict[int, list[int]] = field(default_factory=dict)
    begun: frozenset[int] = frozenset()

    def read(self, slot: int, text: Sequence[int]) -> None:
        """Read all but the last token."""
        self.tokens[slot] = [*text]
        for engine in self.engines[:2]:
            engine.release(slot, 0)
            engine.forward([prompt(slot, np.array(text[:-1]), wanted=0)])

    def step(
        self,
        slots: Sequence[int],
        *,
        stop_ids: Sequence[Sequence[int] | None] | None = None,
        wanted: Callable[[], bool] = lambda: True,
        checked: bool = True,
    ) -> Logits:
        """Commit a token of each text, after a look at what the other engine computes."""
        segments = [
            Segment(slot, len(text) - 1, np.array(text[-1:]), np.array([len(text) - 1]), None, 1)
            for slot in slots
            for text in [self.tokens[slot]]
        ]
        draws = [self.draws[slot] for slot in slots]
        stops = [()] * len(slots) if stop_ids is None else stop_ids
        ours, theirs, _ = self.engines
        logits, self.begun = ours.run_on(segments, draws, FollowingPass(wanted, stops))
        expected = theirs.sample(segments, draws)
        for row, slot in enumerate(slots):
            assert np.allclose(logits.row(row), expected.row(row), atol=2e-4)
            mine, other = logits.choice(row), expected.choice(row)
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert (mine.token, mine.logprobs) == (other.token, other.logprobs) or not checked
            self.tokens[slot].append(int(expected.row(row).argmax()) if other is None else other.token)
        return logits

    def replayed(self, work: Callable[[], object]) -> int:
        before = self.engines[2].replays
        work()
        return self.engines[2].replays - before


def text_of(slot: int) -> list[int]:
    return np.random.default_rng(slot).integers(0, 500, 10 + 5 * slot).tolist()


@pytest.fixture
def texts(engines: tuple[DeviceEngine, DeviceEngine, Tapes]) -> Texts:
    vocabulary = engines[0].vocabulary
    filtered, biased = (
        sampler_of(text_of(slot), vocabulary, **terms).draw(restricts=True)
        for slot, terms in (
            (2, {"seed": 1, "temperature": 0.9, "top_k": 20}),
            (3, {"seed": 1, "logprobs": 2, "logit_bias": {5: 3.0}}),
        )
    )
    assert filtered is not None
    assert biased is not None
    made = Texts(
        engines, {0: Draw(BASES[0], 0.0), 1: Draw(BASES[1], 1.0), 2: filtered, 3: biased, 4: Draw(BASES[4], 0.7)}
    )
    for slot in made.draws:
        made.read(slot, text_of(slot))
    return made


def test_texts_of_several_contracts_continue_without_the_host(texts: Texts) -> None:
    """Of a pass that was begun nothing is left to compute; the one behind it is begun."""
    plain = [0, 1, 4]
    first = texts.replayed(lambda: texts.step(plain))
    assert texts.begun == {0, 1, 4}
    for _ in range(60):  # beyond a page
        assert texts.replayed(lambda: texts.step(plain)) == first / 2
    for _ in range(4):
        texts.step([0, 1, 2, 3, 4])
        assert texts.begun == {0, 1, 2, 3, 4}


def test_only_texts_that_continue_are_begun_and_others_may_leave(texts: Texts) -> None:
    texts.step([0, 1, 4], stop_ids=[(), None, ()])
    assert texts.begun == {0, 4}
    assert texts.replayed(lambda: texts.step([4], wanted=lambda: False)) == 0
    assert texts.begun == frozenset()
    texts.step([0, 1, 4])


def test_no_pass_is_begun_when_all_texts_end(texts: Texts) -> None:
    every = range(texts.engines[0].vocabulary)
    texts.step([0, 1], stop_ids=[every, None])
    assert texts.begun == frozenset()


def test_no_pass_is_begun_when_the_caller_declines(texts: Texts) -> None:
    texts.step([0, 1], wanted=lambda: False)
    assert texts.begun == frozenset()
    texts.step([0, 1])


def test_a_token_other_than_the_chosen_one_has_its_row_computed_again(texts: Texts) -> None:
    texts.step([0, 1])
    texts.tokens[1][-1] += 1
    texts.step([0, 1])
    texts.step([0, 1])


def test_a_joining_text_has_all_rows_computed_again(texts: Texts) -> None:
    texts.step([0, 1])
    texts.step([0, 1, 4])
    assert texts.begun == {0, 1, 4}
    texts.step([0, 1, 4])


@pytest.mark.parametrize("change", ["released", "copied to", "moved"])
def test_another_text_of_equal_length_in_a_slot_is_computed(texts: Texts, change: str) -> None:
    """Its last token, position and draw are those of the text before."""
    texts.step([0, 1])
    assert texts.begun == {0, 1}
    other, last = text_of(4)[: len(texts.tokens[1]) - 1], texts.tokens[1][-1]
    if change == "moved":
        rows = np.arange(5)
        for engine in texts.engines[:2]:
            engine.move(1, rows + 3, rows)
    elif change == "released":
        ours = texts.engines[0]
        ours.release(1, 0)
        texts.tokens[1] = [*other, last]
        begun, ours.next_pass.begun = ours.next_pass.begun, None
        texts.read(1, texts.tokens[1])
        ours.next_pass.begun = begun  # as if no pass had been needed to read it
    else:
        for engine in texts.engines[:2]:
            engine.copy(4, 1, len(other))
        texts.tokens[1] = [*other, last]
    texts.step([0, 1], checked=change != "moved")


def test_no_pass_is_begun_under_penalties(texts: Texts) -> None:
    sampler = sampler_of(text_of(5), texts.engines[0].vocabulary, seed=2, temperature=0.8, presence_penalty=1.0)
    draw = sampler.draw(restricts=True, penalizes=True)
    assert draw is not None
    texts.draws[5] = draw
    texts.read(5, text_of(5))
    texts.step([0, 5])
    assert texts.begun == frozenset()


def test_no_pass_is_begun_beyond_a_slots_rows(texts: Texts) -> None:
    while len(texts.tokens[4]) < HELD:
        texts.step([4])
    texts.step([4])
    assert texts.begun == frozenset()


def test_rows_of_the_previous_pass_stay_readable_after_the_next_is_begun(texts: Texts) -> None:
    logits = texts.step([0, 1])
    row = logits.row(1)
    assert row.shape == (texts.engines[0].vocabulary,)
    assert int(row.argmax()) != int(logits.row(0).argmax()) or not np.allclose(row, logits.row(0))
