"""The noise's prediction of the next token is trusted as far as it was right, and not computed where it has no use."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from outrider.core.construction.expansion import Candidates
from outrider.core.proposers.lookup import Lookups, NoiseMixedSource
from outrider.core.proposers.ngram_tree import NOTHING, Continuation
from outrider.core.proposers.noise_mixture import (
    NOISE,
    BackgroundDistribution,
    NoiseMixtureFit,
)
from outrider.core.sampling.noise import gumbel_at, gumbel_row
from outrider.core.session.contract import Contract

VOCABULARY = 60
FOUND = {7: 0.35, 3: 0.2}


def background() -> BackgroundDistribution:
    """The distribution of a text with every token once."""
    distribution = BackgroundDistribution()
    distribution.extend(range(VOCABULARY))
    return distribution


def world(doubt: bool, fit: NoiseMixtureFit, steps: int = 500) -> tuple[float, float]:
    """Teaches `fit` at places where the target is in doubt each time, or never. Return how often its best token was
    the target's, and how often it predicted that."""
    generator = np.random.default_rng(3)
    distribution = background()
    p = np.full(VOCABULARY, 0.45 / (VOCABULARY - 2))
    p[7], p[3] = FOUND[7], FOUND[3]
    hits, predictions = [], []
    for position in range(steps):
        noise = gumbel_row(11, 0, position, VOCABULARY)
        row = distribution.leading(FOUND, partial(gumbel_at, 11, 0, position))
        token = int((np.log(p) + noise).argmax()) if doubt else int(generator.choice(VOCABULARY, p=p))
        mixed = fit.mixed(FOUND, row, 8)
        best = max(mixed, key=lambda each: mixed[each])
        if position >= steps // 2:
            hits.append(best == token)
            predictions.append(mixed[best])
        fit.observe(FOUND, row, token, 1 / VOCABULARY)
    return float(np.mean(hits)), float(np.mean(predictions))


def test_the_noise_decides_where_the_target_is_uncertain_and_the_chances_elsewhere() -> None:
    doubtful, certain = NoiseMixtureFit(), NoiseMixtureFit()
    assert doubtful.share(FOUND) == certain.share(FOUND) == 0.5
    hits, predicted = world(True, doubtful)
    assert hits > 0.75  # by the chances alone 0.35
    assert predicted == pytest.approx(hits, abs=0.08)
    hits, predicted = world(False, certain)
    assert hits == pytest.approx(0.35, abs=0.07)
    assert predicted == pytest.approx(hits, abs=0.1)
    assert certain.share(FOUND) < 0.45 < 0.8 < doubtful.share(FOUND)
    assert certain.share({1: 0.1}) == 0.5  # places of another class


def test_a_useless_noise_mixture_is_asked_seldom_and_again_when_it_helps() -> None:
    fit, row = NoiseMixtureFit(), Candidates(np.array([5, 6]), np.array([2.0, 1.0]))
    for _ in range(2000):
        fit.observe(FOUND, row, 7, 0.0)
    assert fit.share(FOUND) < NOISE.min_share
    assert sum(fit.wanted(FOUND) for _ in range(10 * NOISE.trial_interval)) == 10
    for _ in range(200):
        fit.observe(FOUND, row, 5, 0.0)
    assert all(fit.wanted(FOUND) for _ in range(NOISE.trial_interval))


def test_the_noise_is_not_used_where_the_chances_are_certain() -> None:
    fit = NoiseMixtureFit()
    assert not fit.wanted({7: NOISE.bounds[1], 3: 0.1})
    assert fit.wanted({7: NOISE.bounds[1] - 0.01, 3: 0.1})
    assert fit.wanted({})


def test_a_source_s_draft_has_its_chances_and_leaves_the_rest_to_frequent_tokens() -> None:
    distribution = background()
    distribution.extend([9] * 100)
    silent = distribution.leading({**FOUND, 99: 0.1}, lambda tokens: np.zeros(len(tokens)))
    q = dict(zip(silent.tokens.tolist(), np.exp(silent.scores).tolist(), strict=True))
    assert sum(q.values()) == pytest.approx(1.0, rel=1e-6)
    assert (q[7], q[3], q[99]) == pytest.approx((0.35, 0.2, 0.1), abs=5e-3)  # 99 was not in the text
    assert q[9] > 0.2
    assert np.isfinite(distribution.leading({1: 1.0, 2: 1.0}, lambda tokens: np.zeros(len(tokens))).scores).all()


def test_tokens_beyond_the_initial_capacity_are_all_counted() -> None:
    distribution = BackgroundDistribution()
    distribution.extend([*range(1000), 999])
    row = distribution.leading({}, lambda tokens: np.where(tokens == 998, 0.1, 0.0))
    assert row.tokens[:2].tolist() == [999, 998]


class Script:
    """A lookup that proposes what it was given."""

    def __init__(self, proposal: Continuation) -> None:
        self.proposal = proposal

    def extend(self, tokens: list[int]) -> None:
        """Does nothing."""

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        return self.proposal

    def finish(self, output: list[int]) -> None:
        """Does nothing."""


def test_the_noise_picks_the_first_token_alone_and_keeps_its_continuations() -> None:
    contract = Contract(seed=11, max_tokens=9)
    lookup = NoiseMixedSource(Script(Continuation((-1, 0, 1), (7, 8, 9), (0.5, 0.9, 0.9))), NoiseMixtureFit(), contract)
    lookup.extend([*range(20), 1, 1, 1, 1])
    proposal = lookup.propose(24, 24)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for index, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        assert parent < index
        paths[index] = (*paths[parent], token)
    assert {(7,), (7, 8), (7, 8, 9)} < set(paths.values())
    assert len(proposal.first) == len(proposal.tokens) - 2 == 8
    assert proposal.first[7] != 0.5
    leading = background().leading({7: 0.5}, partial(gumbel_at, 11, 0, 24))
    assert next(token for token in leading.tokens.tolist() if token < 20) in proposal.first
    assert lookup.propose(24, 24) == proposal
    assert len(lookup.propose(2, 24).tokens) == 2


def test_a_source_changed_by_another_session_is_proposed_as_well() -> None:
    source = Script(Continuation((-1,), (7,), (0.5,)))
    lookup = NoiseMixedSource(source, NoiseMixtureFit(), Contract(seed=11, max_tokens=9))
    lookup.extend([*range(20)])
    lookup.propose(4, 4)
    source.proposal = Continuation((-1, -1), (99, 98), (0.4, 0.3))
    assert {99, 98} < set(lookup.propose(24, 4).first)


def test_the_noise_mixture_learns_from_the_following_token() -> None:
    fit = NoiseMixtureFit()
    lookup = NoiseMixedSource(Script(Continuation((-1,), (7,), (0.5,))), fit, Contract(seed=11, max_tokens=9))
    lookup.extend([*range(20)])
    for _ in range(50):
        lookup.propose(4, 4)
        lookup.extend([7])
    assert fit.share({7: 0.5}) < 0.5
    before = fit.share({7: 0.5})
    lookup.extend([7])  # nothing was asked
    assert fit.share({7: 0.5}) == before


def test_the_noise_mixture_proposes_nothing_before_a_text_or_for_no_nodes() -> None:
    lookup = NoiseMixedSource(Script(NOTHING), NoiseMixtureFit(), Contract(seed=1, max_tokens=9))
    assert lookup.propose(4, 4) == NOTHING
    lookup.extend([1])
    assert lookup.propose(0, 4) == NOTHING


@pytest.mark.parametrize(
    ("terms", "asked"),
    [
        ({}, True),
        ({"top_p": 0.9}, True),
        ({"temperature": 0.0}, False),
        ({"rule": "target-match"}, False),
        ({"banned_ids": (7,)}, False),
        ({"presence_penalty": 1.0}, False),
    ],
)
def test_the_noise_mixture_is_used_where_noise_is_shared_and_decides(terms: dict, asked: bool) -> None:
    lookup = Lookups("suffix", None).begin("", Contract(seed=1, max_tokens=9, **terms))
    assert isinstance(lookup, NoiseMixedSource) is asked


def test_the_share_of_the_noise_is_learned_for_each_class_of_contracts() -> None:
    lookups = Lookups("suffix", None)

    def fit(**terms: float) -> NoiseMixtureFit:
        lookup = lookups.begin("", Contract(seed=1, max_tokens=9, **terms))
        assert isinstance(lookup, NoiseMixedSource)
        return lookup.fit

    assert fit(temperature=1.0) is fit(temperature=0.9)
    fits = {fit(temperature=heat, top_p=share) for heat in (0.4, 0.7, 1.0) for share in (0.9, 1.0)}
    assert len(fits) == 6
    assert math.isclose(fit().share({}), 0.5)
