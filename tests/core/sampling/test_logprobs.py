"""Log-probabilities are the raw model's, and survive their bytes."""

import numpy as np
import pytest

from outrider.core.sampling.logprobs import alternatives, narrowed, pack, score, stride, unpack
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract

LOGITS = np.random.default_rng(0).normal(0, 3, 50).astype(np.float32)


def test_log_probabilities_are_log_softmax_of_the_raw_logits_best_first() -> None:
    blob = pack(LOGITS, 7, 3) + pack(LOGITS * 2, 9, 3)
    assert len(blob) == 2 * stride(3)
    first, second = unpack(blob, 3)
    exact = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert first.logprob == pytest.approx(exact[7], abs=1e-6)
    assert first.top_ids == np.argsort(-exact)[:3].tolist()
    assert first.top_logprobs == pytest.approx(np.sort(exact)[::-1][:3], abs=1e-6)
    assert second.logprob != first.logprob


def test_a_choice_carries_log_probabilities_regardless_of_temperature_and_filters() -> None:
    contract = Contract(seed=1, max_tokens=1, temperature=0.3, top_k=2, logprobs=1)
    choice = Sampler(contract, 50, [0] * 5, 0).choose(LOGITS)
    assert choice.logprobs == pack(LOGITS, choice.token, 1)
    assert Sampler(Contract(seed=1, max_tokens=1), 50, [0], 0).choose(LOGITS).logprobs == b""


def test_alternatives_beyond_the_vocabulary_are_filled_with_impossible_ones() -> None:
    (entry,) = unpack(pack(LOGITS[:2], 0, 4), 4)
    assert entry.top_logprobs[2:] == [-np.inf, -np.inf]


def test_the_lower_id_wins_a_tie() -> None:
    (entry,) = unpack(pack(np.zeros(5, np.float32), 3, 2), 2)
    assert entry.top_ids == [0, 1]


def test_bytes_that_are_no_whole_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        unpack(b"123", 0)


def test_entries_are_narrowed_to_the_requested_alternatives() -> None:
    wide = pack(LOGITS, 7, 16) + pack(LOGITS * 2, 9, 16)
    assert narrowed(wide, 16, 3) == pack(LOGITS, 7, 3) + pack(LOGITS * 2, 9, 3)
    assert narrowed(wide, 16, 0) == pack(LOGITS, 7, 0) + pack(LOGITS * 2, 9, 0)
    assert narrowed(wide, 16, 16) == wide
    assert narrowed(wide, 16, None) == b""


def test_alternatives_of_many_entries_are_read_in_one_call() -> None:
    ids, logprobs = alternatives(pack(LOGITS, 7, 16) + pack(LOGITS * 2, 9, 16), 16)
    entries = unpack(pack(LOGITS, 7, 16) + pack(LOGITS * 2, 9, 16), 16)
    assert ids.tolist() == [entry.top_ids for entry in entries]
    assert logprobs.tolist() == [entry.top_logprobs for entry in entries]


def test_an_entry_may_have_no_alternatives() -> None:
    entries = unpack(pack(LOGITS, 7, 0) + pack(LOGITS, 9, 0), 0)
    assert [entry.top_ids for entry in entries] == [[], []]
    assert entries[0].logprob - entries[1].logprob == pytest.approx(LOGITS[7] - LOGITS[9], abs=1e-5)


def test_given_tokens_have_their_log_probabilities_and_ranks() -> None:
    rows = np.array([[0.0, 2.0, 1.0, -np.inf], [3.0, 3.0, 1.0, 0.0]], np.float32)
    for tokens, ranks in (((1, 1), (1, 1)), ((2, 2), (2, 3)), ((3, 3), (4, 4))):
        found = score(rows, tokens, 1)
        assert found.ranks == ranks
        assert found.logprobs == b"".join(pack(row, token, 1) for row, token in zip(rows, tokens, strict=True))
    with pytest.raises(ValueError, match="shorter"):
        score(rows, (1,), 1)
