"""Models that cannot take back what they have read are served without trees, and generate what they generate alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.interface.engine import Engine
from outrider.engine.kv.kv_slots import KvSlots
from outrider.engine.loading import load_engine
from outrider.engine.transformers.treeless import TreelessEngine
from tests.engine.families import PLAIN, make_family
from tests.engine.small_checkpoints import Reference, Tree, assert_same, prompt, random_tokens

Pair = tuple[Engine, Reference]


@pytest.fixture(scope="module", params=PLAIN)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = make_family(tmp_path_factory.mktemp(request.param), request.param)
    engine = load_engine(folder, dtype="float32", slots=4, rows=128, threads=1)
    assert isinstance(engine, TreelessEngine)
    return engine, Reference.load(folder, attention=None)


def test_the_reason_is_given_and_trees_are_refused(pair: Pair) -> None:
    engine, _ = pair
    assert "its logits over rows" in engine.treeless or "cache of rows" in engine.treeless
    tokens = np.array([3, 4, 5])
    engine.forward([prompt(0, tokens)])
    with pytest.raises(ValueError, match="a tree, and this model takes none"):
        engine.forward([Tree([-1, -1], tokens[:2]).segment(0, 3)])
    with pytest.raises(ValueError, match="prefix 2, and the slot's state ends at 3"):
        engine.forward([prompt(0, tokens, 2)])


def test_interleaved_sessions_give_the_tokens_of_generate(pair: Pair) -> None:
    engine, reference = pair
    random = np.random.default_rng(1)
    texts = {slot: random_tokens(engine, random, length) for slot, length in ((2, 20), (0, 7), (3, 1))}
    expected = {
        slot: reference.model.generate(
            torch.tensor([text.tolist()]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(text), dtype=torch.int64),
        )[0].tolist()
        for slot, text in texts.items()
    }
    generated = {slot: text.tolist() for slot, text in texts.items()}
    half = prompt(2, texts[2][:9], wanted=0)
    assert engine.forward([half]).shape == (0, engine.vocabulary)
    done = {2: 9, 0: 0, 3: 0}
    for _ in range(12):
        pending = [prompt(slot, np.array(text[done[slot] :]), done[slot], wanted=1) for slot, text in generated.items()]
        done = {slot: len(text) for slot, text in generated.items()}
        for text, logits in zip(generated.values(), engine.forward(pending), strict=True):
            text.append(int(logits.argmax()))
    assert generated == expected


def test_a_copied_session_diverges_from_its_source(pair: Pair) -> None:
    engine, reference = pair
    random = np.random.default_rng(2)
    text, one, other = (random_tokens(engine, random, count) for count in (11, 4, 4))
    engine.forward([prompt(1, text)])
    engine.copy(1, 2, 11)
    with pytest.raises(ValueError, match="cannot copy 5 rows"):
        engine.copy(1, 2, 5)
    logits = engine.forward([prompt(1, one, 11), prompt(2, other, 11)])
    alone = [reference.logits(np.concatenate([text, more]))[-4:] for more in (one, other)]
    assert_same(logits / 4, np.concatenate(alone) / 4)


def test_pass_costs_of_a_treeless_model_are_measured(pair: Pair) -> None:
    costs = pair[0].measure_costs([2, 8], repeats=1)
    assert [count for count, _ in costs] == [2, 8]


def test_a_slot_without_rewind_is_continued_only_at_its_end(tmp_path: Path) -> None:
    slots = KvSlots(2, rewinds=False)
    text = [*range(30)]
    first = slots.acquire(text, "a")
    slots.release(first.slot, text, "a")
    forked = slots.acquire([*range(20), 99], "a")
    assert (forked.cached, forked.slot) == (0, 1 - first.slot)
    again = slots.acquire([*text, 7], "a")
    assert again == (first.slot, 30, None)
