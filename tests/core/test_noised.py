"""What the noise says of a source's tokens is believed as far as it was right."""

import math

import numpy as np
import pytest

from outrider.core.contract import Contract
from outrider.core.noise import gumbel_row
from outrider.core.noised import Background, NoisedFit
from outrider.core.sampler import Sampler

VOCABULARY = 60
FOUND = [(7, math.log(0.55)), (3, math.log(0.3))]


def world(doubt: bool, fit: NoisedFit, steps: int = 500) -> tuple[float, float]:
    """Teaches `fit` at places where the target is in doubt each time, or never; then says how often its best token was
    the target's, and how often it believed so."""
    generator = np.random.default_rng(3)
    background = Background(VOCABULARY)
    p = np.full(VOCABULARY, 0.15 / (VOCABULARY - 2))
    p[7], p[3] = 0.55, 0.3
    hits, beliefs = [], []
    for position in range(steps):
        noise = gumbel_row(11, 0, position, VOCABULARY)
        scores = background.logits(FOUND, 1.0) + noise
        token = int((np.log(p) + noise).argmax()) if doubt else int(generator.choice(VOCABULARY, p=p))
        ((best, chance),) = fit.edges(FOUND, scores, 1)
        if position >= steps // 2:
            hits.append(best == token)
            beliefs.append(math.exp(chance))
        fit.observe(FOUND, scores, token)
    return float(np.mean(hits)), float(np.mean(beliefs))


def test_where_the_target_is_in_doubt_the_noise_decides_and_elsewhere_the_chances_do() -> None:
    doubtful, certain = NoisedFit(), NoisedFit()
    assert doubtful.share(FOUND) == certain.share(FOUND) == 0.5
    hits, believed = world(True, doubtful)
    assert hits > 0.85  # by the chances alone 0.55
    assert believed == pytest.approx(hits, abs=0.08)
    hits, believed = world(False, certain)
    assert hits == pytest.approx(0.55, abs=0.07)
    assert believed == pytest.approx(hits, abs=0.1)
    assert certain.share(FOUND) < 0.4 < 0.8 < doubtful.share(FOUND)
    assert certain.share([(1, -0.01)]) == 0.5  # places of another class


def test_a_source_s_draft_has_its_chances_and_leaves_the_rest_to_what_is_said_often() -> None:
    background = Background(VOCABULARY)
    background.extend([9] * 100)
    for temperature in (0.5, 1.0):
        logits = background.logits(FOUND, temperature)
        q = np.exp(logits.astype(float) / temperature)
        assert q.sum() == pytest.approx(1.0, rel=1e-4)
        assert (q[7], q[3]) == pytest.approx((0.55, 0.3), abs=1e-3)
        assert q[9] > 0.1
    assert np.isfinite(background.logits([(1, 0.0)], 1.0)).all()


def test_what_may_not_be_said_is_not_proposed() -> None:
    contract = Contract(seed=1, max_tokens=5, banned_ids=(7,))
    sampler = Sampler(contract, VOCABULARY, [1, 2], 2)
    scores = sampler.scores(Background(VOCABULARY).logits(FOUND, 1.0))
    edges = NoisedFit().edges(FOUND, scores, 8)
    assert 7 not in dict(edges)
    assert len(edges) == 8
    assert [chance for _, chance in edges] == sorted((chance for _, chance in edges), reverse=True)
