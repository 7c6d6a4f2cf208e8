"""The compiled choice: numpy's tokens and scores, to the last bit where numpy takes no logarithm."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.sampling.compiled import CompiledSampler, compiled_sampler, log_total
from outrider.core.sampling.filters import best_of
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract

V = 700
ids = st.integers(0, V + 20)  # a drafter's vocabulary may lack ids that a contract names, and tokens of the text
contracts = st.builds(
    Contract,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(50),
    choice=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 20, V - 1, V, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.6, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=5),
    allowed_ids=st.just(()) | st.lists(ids, min_size=30, max_size=60, unique=True),
    banned_ids=st.lists(ids, max_size=6),
    min_tokens=st.integers(0, 8),
    stop_ids=st.lists(ids, max_size=3),
).filter(lambda contract: contract.allows_any(V))
texts = st.lists(ids, max_size=12)


def rows(seed: int, size: int, kind: str) -> np.ndarray:
    """Logits: as a model gives them, few values with many ties, or with values that mean never."""
    dice = np.random.default_rng(seed)
    row = dice.normal(0, 3, size)
    if kind == "ties":
        row = np.round(row)
    if kind == "never":
        row[dice.random(size) < 0.5] = -np.inf
        row[dice.integers(size)] = 0.0
    return row.astype(np.float32)


kinds = st.sampled_from(["model", "ties", "never"])


@given(contracts, st.integers(0, 2**32), kinds, texts, texts, texts, st.sampled_from([1, 2, 64, 10**4]), st.booleans())
def test_compiled_code_ranks_tokens_as_numpy_does(
    contract: Contract,
    seed: int,
    kind: str,
    prompt: list[int],
    answer: list[int],
    path: list[int],
    count: int,
    noised: bool,
) -> None:
    logits = rows(seed, V, kind)
    slow = Sampler(contract, V, prompt + answer, len(prompt), compiled=False)
    fast, resumed = (compiled_sampler(contract, V, text, len(prompt)) for text in (prompt, prompt + answer))
    assert fast is not None
    assert resumed is not None
    fast.extend(answer)
    for tokens_of_path in (path, path[:3], path):  # it forgets the path again
        again = resumed.leading(logits, tokens_of_path, count, noised=noised)
        tokens, scores = slow.leading(logits, tokens_of_path, count, noised=noised)
        found = fast.leading(logits, tokens_of_path, count, noised=noised)
        if found is None or again is None:
            assert again is None is found
            continue
        assert [part.tolist() for part in found] == [part.tolist() for part in again]
        drawn = noised and not contract.greedy
        if not drawn:
            assert found[0].tolist() == tokens.tolist()
            assert found[1].tolist() == scores.tolist()
        else:
            assert found[0][:1].tolist() == tokens[:1].tolist()
            assert found[1] == pytest.approx(scores, abs=1e-9)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 511, 513, 4096, 151_936])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 4.0},  # its nucleus is large
        {"top_k": 40, "top_p": 0.95, "min_p": 0.03},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2, "banned_ids": [3]},
        {"logprobs": 5},
    ],
    ids=str,
)
def test_compiled_code_chooses_the_token_of_numpy_in_any_vocabulary(size: int, change: dict[str, object]) -> None:
    contract = Contract(seed=7, max_tokens=9, **change)  # type: ignore[arg-type]
    text = [*range(30)]
    for seed in range(3 if size > 5000 else 40):
        logits = rows(seed, size, "model")
        args = replace(contract, seed=seed), size, text, 20
        slow, fast = Sampler(*args, compiled=False).choose(logits), Sampler(*args).choose(logits)
        assert (fast.token, fast.logprobs) == (slow.token, slow.logprobs)
        assert fast.gap == pytest.approx(slow.gap, abs=1e-9)


def test_rows_are_seldom_left_to_numpy() -> None:
    left = 0
    for seed in range(400):
        contract = Contract(seed=seed, max_tokens=9, top_p=0.9, min_p=0.01)
        fast = CompiledSampler(contract, 3000, [1], 1)
        left += fast.leading(rows(seed, 3000, "model"), [], 2, noised=True) is None
    assert left <= 4  # each bound is within 1e-6 of a step of the sum once in some thousand rows


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"top_p": 0.5}, [0.0, 0.0]),  # half of the probability is reached exactly, or nearly so
        ({"min_p": math.exp(-0.5)}, [0.0, -0.5]),
    ],
    ids=str,
)
def test_a_choice_that_rounding_could_decide_is_left_to_numpy(change: dict[str, float], row: list[float]) -> None:
    contract = Contract(seed=1, max_tokens=9, **change)  # type: ignore[arg-type]
    logits = np.array(row, np.float32)
    assert CompiledSampler(contract, 2, [1], 1).leading(logits, [], 2, noised=True) is None
    assert Sampler(contract, 2, [1], 1).choose(logits) == Sampler(contract, 2, [1], 1, compiled=False).choose(logits)


def test_a_row_of_nans_still_gives_a_token() -> None:
    nothing = np.full(40, np.nan, np.float32)
    for change in ({}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 3}, {"min_p": 0.2}):
        contract = Contract(seed=1, max_tokens=9, **change)  # type: ignore[arg-type]
        sampler = Sampler(contract, 40, [1], 1)
        choice = sampler.choose(nothing)
        assert choice.token == sampler.scores(nothing).argmax()
        assert np.isnan(choice.gap)


def test_compiled_code_chooses_wherever_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    contract, logits = Contract(seed=1, max_tokens=9), rows(1, V, "model")
    monkeypatch.setattr(Sampler, "scores", None)  # then numpy computes them
    assert 0 <= Sampler(contract, V, [1], 1).choose(logits).token < V
    monkeypatch.setattr("outrider.core.sampling.compiled._native", None)
    with pytest.raises(TypeError):
        Sampler(contract, V, [1], 1).choose(logits)


def test_the_best_tokens_and_the_log_sum_equal_those_of_numpy() -> None:
    for size in (1, 7, 600, 151_936):
        logits = rows(size, size, "model")
        tokens, scores, total = log_total(logits, min(size, 20))
        exact = logits.astype(np.float64)
        assert total == pytest.approx(exact.max() + np.log(np.exp(exact - exact.max()).sum()), abs=1e-7)
        expected = best_of(exact, 20)
        assert tokens.tolist() == expected[0].tolist()
        assert scores.tolist() == expected[1].tolist()


def test_rows_and_ids_that_do_not_fit_are_refused() -> None:
    fast = CompiledSampler(Contract(seed=1, max_tokens=9), 40, [1], 1)
    with pytest.raises(ValueError, match="40 items"):
        fast.leading(np.zeros(39, np.float32), [], 2, noised=True)
    with pytest.raises(ValueError, match="not negative"):
        fast.extend([-1])
