"""3. The noise."""

import math

import numpy as np
import pytest

from outrider.core.sampling.noise import NoiseRows, gumbel_row, noise_bits, noise_key
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.page import table
from tests.e2e.protocol.peers import decoding, delta, drafting

WORD = 2**64
PHI = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def number(text: str) -> int:
    """What "2^64 - 1" stands for."""
    power, _, less = text.partition("-")
    base, _, exponent = power.partition("^")
    return int(base) ** int(exponent or 1) - int(less or 0)


def key_by_the_page(seed: int, choice: int, t: int) -> int:
    return mix64((mix64((seed + choice * PHI) % WORD) + t * PHI) % WORD)


def noise_by_the_page(key: int, x: int) -> float:
    k = mix64((key + PHI * (x + 1)) % WORD) >> 32
    u = min((k + 0.5) * 2**-32, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


def choice_by_the_page(logits: list[float], contract: Contract, tokens: list[int], answer: int) -> int:
    """argmax over x of log p_t(x) + g_t(x), p as steps 1 to 5 have it."""
    t, z = len(tokens), list(logits)
    for x, bias in contract.logit_bias:
        z[x] += bias
    for x in set(tokens):
        z[x] = z[x] / contract.repetition_penalty if z[x] > 0 else z[x] * contract.repetition_penalty
    for x in set(tokens[answer:]):
        z[x] -= contract.presence_penalty + contract.frequency_penalty * tokens[answer:].count(x)
    allowed = set(contract.allowed_ids or range(len(z))) - set(contract.banned_ids)
    if t - answer < contract.min_tokens:
        allowed -= set(contract.stop_ids)
    scaled = [value / (contract.temperature or 1.0) for value in z]
    kept = sorted(allowed, key=lambda x: (-scaled[x], x))
    if contract.temperature:
        kept = kept[: contract.top_k or len(kept)]
        total, reached, nucleus = sum(math.exp(scaled[x]) for x in kept), 0.0, []
        for x in kept:
            if reached >= contract.top_p * total:
                break
            nucleus.append(x)
            reached += math.exp(scaled[x])
        kept = [x for x in nucleus if math.exp(scaled[x] - scaled[nucleus[0]]) >= contract.min_p]
    key = key_by_the_page(contract.seed, contract.choice, t)
    gumbel = {x: noise_by_the_page(key, x) if contract.temperature else 0.0 for x in kept}
    return max(kept, key=lambda x: (scaled[x] + gumbel[x], -x))


def test_the_noise_formula_and_vectors_of_the_page_equal_the_code() -> None:
    rows = table(3)
    assert len(rows) == 4
    for name, key, bits in rows:
        seed, choice, t = map(number, name.split(","))
        assert int(key, 16) == key_by_the_page(seed, choice, t) == noise_key(seed, choice, t)
        wanted = [int(word, 16) for word in bits.split()]
        assert wanted == [mix64((int(key, 16) + PHI * (x + 1)) % WORD) >> 32 for x in range(3)]
        assert wanted == noise_bits(int(key, 16), 0, 3).tolist()


@pytest.mark.parametrize("t", [0, 1, 7, 1023])
def test_the_gumbel_noise_equals_the_pages_formula_and_is_finite(t: int) -> None:
    row = gumbel_row(7, 3, t, 4096)
    key = key_by_the_page(7, 3, t)
    assert row == pytest.approx([noise_by_the_page(key, x) for x in range(4096)], rel=1e-12)
    assert row.dtype == np.float64
    assert np.isfinite(row).all()


def test_temperature_0_has_no_noise() -> None:
    rows = NoiseRows.of(Contract(seed=9, max_tokens=1, temperature=0.0), 100)
    assert rows.row(5) is None


@pytest.mark.parametrize(
    "contract",
    [
        Contract(seed=1, max_tokens=1, temperature=0.0),
        Contract(seed=1, max_tokens=1, temperature=1.0),
        Contract(seed=2, max_tokens=1, temperature=0.7, top_k=20),
        Contract(seed=3, max_tokens=1, temperature=1.3, top_p=0.8),
        Contract(seed=4, max_tokens=1, temperature=1.5, top_k=30, top_p=0.9, choice=5),
        Contract(seed=5, max_tokens=1, min_p=0.1, logit_bias=((3, 4.0), (9, -5.0)), banned_ids=(7, 8)),
        Contract(seed=6, max_tokens=90, temperature=0.0, min_tokens=60, stop_ids=tuple(range(60))),
        Contract(seed=7, max_tokens=1, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.4),
        Contract(seed=8, max_tokens=1, temperature=0.0, repetition_penalty=0.8, allowed_ids=tuple(range(20, 150))),
    ],
    ids=["greedy", "whole", "top-k", "top-p", "both", "biased", "not to stop", "penalized", "allowed"],
)
def test_the_target_s_token_is_the_argmax_after_the_page_s_five_steps(contract: Contract) -> None:
    random = np.random.default_rng(8)
    tokens = [11, 12, 13, 11]
    sampler = Sampler(contract, 200, tokens, len(tokens))
    for _ in range(100):
        logits = random.normal(scale=3.0, size=200).astype(np.float32)
        token = sampler.choose(logits).token
        assert token == choice_by_the_page(logits.tolist(), contract, tokens, 4)
        tokens.append(token)
        sampler.extend([token])
    assert len(set(tokens)) > 50


def test_the_lowest_id_wins_a_tie() -> None:
    logits = np.zeros(50, np.float32)
    logits[[7, 31, 44]] = 2.0
    assert Sampler(Contract(seed=1, max_tokens=1, temperature=0.0), 50, [0], 1).choose(logits).token == 7


@pytest.mark.asyncio(loop_scope="session")
async def test_a_node_is_accepted_if_and_only_if_it_has_the_targets_token(verifier: str, text: Text) -> None:
    right, root = text.answer, len(text.prompt) - 1
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.full()
        await drafter.attach(router.session)
        # First, as certain, a wrong token with the right ones below it; then, as hopeless, the right ones alone.
        wrong = [(right[8] + 1) % 4096, *right[9:12]]
        drafter.send_frame(**delta(text.whole, root + 8, wrong))
        await drafter.received_all(router.session)
        report = await router.step()
        assert (report.verified > 0, report.accepted) == (True, 0)
        hopeless = delta(text.whole, root + 16, right[16:20], first_id=5, edges=b"\xff" * 4)
        drafter.send_frame(**hopeless)
        await drafter.received_all(router.session)
        report = await router.step()
        assert report.accepted == report.verified > 0
        assert router.tokens == text.whole[: len(router.tokens)]
