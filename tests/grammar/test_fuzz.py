"""Whatever callers send as a grammar takes bounded time and memory, ends no process but its own, and is kept to."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.core.sampling.grammar import GrammarDelayed
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.grammar.child import GRAMMAR_BYTES
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.place import GrammarPlace
from tests.grammar.inputs import fuzzed

FOLDER = Path(__file__).parents[2] / "models/target"
VOCABULARY, EOS = 4096, 0
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
LONGEST = 40  # tokens of an answer
GRAMMAR_S = 20.0  # to compile and to follow one grammar, on a busy machine; its bounds are of the processor
SLACK = 32 << 10  # KiB that this process may grow by


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(FOLDER, VOCABULARY, [EOS])
    yield compiler
    compiler.close()


def follow(state: GrammarPlace, rng: random.Random, *, ends: bool) -> list[int] | None:
    """Return a random answer that the grammar allows; None where it is not at its end. What is found behind a path is
    what is found once the path is committed."""
    answer: list[int] = []
    beyond: np.ndarray | None = None
    while len(answer) < LONGEST:
        mask = state.allowed(())
        if beyond is not None:
            assert (mask == beyond).all()
        allowed = np.flatnonzero(mask)
        assert len(allowed), "a text that cannot go on and not end"
        asked = rng.sample(range(1, VOCABULARY), 6)
        assert [*state.first_allowed((), asked, 6)] == np.flatnonzero(mask[asked]).tolist()
        forced = state.forced()
        assert not forced or allowed.tolist() == forced[:1]
        if mask[EOS] and (ends or len(allowed) == 1):
            return answer
        token = int(rng.choice(allowed[allowed != EOS].tolist()))
        beyond = state.allowed([token])
        state.extend([token])
        answer.append(token)
    return None


def _started(compiler: GrammarCompiler, grammar: Grammar) -> GrammarPlace:
    try:
        return compiler.start(grammar)
    except Unavailable:  # other work left the process no processor for seconds; the second time it has to answer
        return compiler.start(grammar)


def tried(compiler: GrammarCompiler, seed: int) -> str:
    """Compile and follow the grammar of a seed. Return what became of it."""
    rng = random.Random(seed)
    try:
        made = fuzzed(seed)
        state = _started(compiler, made.grammar)
    except (InvalidRequest, Overloaded) as error:
        return type(error).__name__
    try:
        answer = follow(state, rng, ends=rng.random() < 0.7)
    except GrammarDelayed:
        assert isinstance(state.failure, InvalidRequest), state.failure
        return "failed"
    finally:
        state.close()
    if answer is None:
        return "followed"
    text = TOKENIZER.decode(answer, skip_special_tokens=False)
    assert made.holds(text), (made.grammar, text)
    return "ended"


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(500, id="500"),
        pytest.param(100_000, id="100000", marks=[pytest.mark.long, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_no_fuzzed_grammar_exceeds_its_bounds_or_harms_the_next_one(compiler: GrammarCompiler, count: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    became: dict[str, int] = {}
    for seed in range(count):
        began = time.monotonic()
        outcome = tried(compiler, seed)
        became[outcome] = became.get(outcome, 0) + 1
        assert time.monotonic() - began < GRAMMAR_S, seed
    assert became["ended"] > count / 10, became
    assert became["InvalidRequest"] > count / 20, became
    assert compiler.usage.bytes < 33 * GRAMMAR_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < SLACK
