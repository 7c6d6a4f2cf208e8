"""The rules that hold p against q are lossless: exact joint distributions, by enumeration, to 1e-9."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outrider.core.acceptance import (
    ChildSampling,
    RandomSource,
    Rule,
    SeededRandom,
    SparseRow,
    VerifiedRows,
    Walk,
    rule_of,
)
from outrider.core.acceptance.block_verification import TraversalVerification
from outrider.core.acceptance.interface import Judge, accepted_walk
from outrider.core.acceptance.rejection import RecursiveRejection, remove_token, residual
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import RULES, Contract
from outrider.core.session.digest import PHI, mix64
from outrider.core.tree.static_trees import Shape, chain_shape, size_of
from tests.core.acceptance.enumeration import (
    JudgeOf,
    Language,
    Path,
    Tape,
    Tree,
    cut,
    distance,
    drawn,
    law_of,
    outcomes,
    shapes,
)

PLAIN = Contract(seed=0, max_tokens=9)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.4},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.5},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "bans": {"banned_ids": (1,), "min_tokens": 2, "stop_ids": (0,)},
    "bias": {"logit_bias": ((0, 1.5),), "allowed_ids": (0, 2)},
}
TREES = ("recursive-rejection", "traversal-verification")
CHAINS = ("speculative-sampling", "block-verification")


def rule(name: str) -> Rule:
    return rule_of(Contract(seed=0, max_tokens=1, rule=name))


def error(rule: Rule, language: Language, shape: Shape, length: int) -> float:
    return distance(law_of(rule, language, length, lambda chance: drawn(language, shape, chance)), language.law(length))


def test_outcomes_enumerate_every_random_result_with_its_probability() -> None:
    def run(chance: RandomSource) -> tuple[int, bool]:
        first = chance.pick(np.array([2.0, 0.0, 1.0]))
        return first, first == 2 and chance.happens(0.25)

    assert {result: weight for weight, result in outcomes(run)} == pytest.approx(
        {(0, False): 2 / 3, (2, False): 0.25, (2, True): 1 / 12}
    )


def test_every_rule_of_the_contract_is_known() -> None:
    for name in RULES:
        assert rule(name).name == name


def cases() -> Iterator[Any]:
    for name in TREES:
        yield pytest.param(name, 2, 3, shapes(2, 3, 7), id=f"{name}-2")
        yield pytest.param(name, 3, 3, shapes(3, 3, 5), id=f"{name}-3")
    for name in CHAINS:
        yield pytest.param(name, 3, 3, [chain_shape(length) for length in range(4)], id=f"{name}-3")


@pytest.mark.parametrize(("name", "vocabulary", "depth", "every"), [*cases()])
def test_the_text_is_distributed_as_the_target_s_for_every_shape(
    name: str, vocabulary: int, depth: int, every: list[Shape]
) -> None:
    for seed, shape in enumerate(every):
        assert error(rule(name), Language(vocabulary, PLAIN, seed=seed), shape, depth + 1) < 1e-9, shape


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_the_text_is_distributed_as_the_targets_under_every_filter(name: str, filters: str) -> None:
    contract = Contract(seed=0, max_tokens=9, **FILTERS[filters])
    shape = chain_shape(3) if name in CHAINS else (((), ()), ((),))
    for seed in range(4):
        assert error(rule(name), Language(3, contract, seed=seed), shape, size_of(chain_shape(3)) + 1) < 1e-9


@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_the_text_is_distributed_as_the_targets_for_any_number_of_streamed_levels(name: str) -> None:
    whole = chain_shape(3) if name in CHAINS else ((((),), ()), ((),))
    for levels in range(4):
        assert error(rule(name), Language(2, PLAIN, seed=levels), cut(whole, levels), 4) < 1e-9


@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_a_draft_equal_to_the_target_is_accepted_whole(name: str) -> None:
    language = Language(3, PLAIN)
    language.p = lambda path: language.q(path).dense(3)  # type: ignore[method-assign]
    for chance, walked in outcomes(lambda chance: walk_of(rule(name), language, chain_shape(3), chance)):
        assert len(walked.path) == 3 or chance < 1e-12


def walk_of(rule: Rule, language: Language, shape: Shape, chance: RandomSource) -> Walk:
    tree = drawn(language, shape, chance)
    return rule.walk(tree.rows, JudgeOf(language, tree), chance)


def expected(rule: Rule, language: Language, shape: Shape) -> float:
    return sum(chance * len(walked.choices) for chance, walked in outcomes(lambda c: walk_of(rule, language, shape, c)))


def test_judging_jointly_accepts_no_less_than_token_by_token() -> None:
    """The papers' claims: block and traversal verification are never worse, and somewhere better."""
    gains = []
    for seed in range(12):
        language = Language(3, PLAIN, seed=seed)
        gains.append(
            expected(rule("block-verification"), language, chain_shape(3))
            - expected(rule("speculative-sampling"), language, chain_shape(3))
        )
        shape = (((), ()), ((),))
        gains.append(
            expected(rule("traversal-verification"), language, shape)
            - expected(rule("recursive-rejection"), language, shape)
        )
    assert min(gains) > -1e-12
    assert max(gains) > 0.02


def test_any_tree_of_top_tokens_is_lossless_under_target_match() -> None:
    for seed, paths in enumerate([[()], [(), (0,)], [(), (0,), (1,), (1, 0)], [(), (2,), (2, 2), (2, 1), (2, 2, 0)]]):
        language = Language(3, PLAIN, seed=seed)
        tree = Tree(paths, [-1, *(paths.index(path[:-1]) for path in paths[1:])])
        assert distance(law_of(rule("target-match"), language, 4, lambda _, t=tree: t), language.law(4)) < 1e-9


class Forgetful(RecursiveRejection):
    """Draws the correction from p itself."""

    def _try_children(
        self, rows: VerifiedRows, judge: Judge, chance: RandomSource, row: int
    ) -> tuple[FloatRow, int | None]:
        _, child = super()._try_children(rows, judge, chance, row)
        return judge.p(row), child


class WithReplacement(RecursiveRejection):
    """Leaves what was drawn in q."""

    def _try_children(
        self, rows: VerifiedRows, judge: Judge, chance: RandomSource, row: int
    ) -> tuple[FloatRow, int | None]:
        p = judge.p(row)
        for child in rows.children[row]:
            token, q = rows.tokens[child], judge.q(row)
            if chance.happens(min(1.0, float(p[token] / q[token]))):
                return p, child
            rest = (p - q).clip(min=0)
            p = rest / rest.sum()
        return p, None


class NoTally(TraversalVerification):
    """Leaves alpha as it was when a child is rejected."""

    def _visit(self, rows: VerifiedRows, judge: Judge, chance: RandomSource, row: int, alpha: float) -> Any:
        first, p = alpha, judge.p(row)
        q = judge.q(row).copy() if rows.children[row] else p
        for child in rows.children[row]:
            token = rows.tokens[child]
            found = self._visit(rows, judge, chance, child, min(1.0, alpha * float(p[token]) / float(q[token])))
            if found:
                return found._replace(path=[*found.path, child])
            rest = (alpha * p - q).clip(min=0.0)
            if rest.sum() <= 0:
                return None
            p = rest / rest.sum()
            remove_token(q, token)
        return super()._visit(VerifiedRows([-1], [0]), _Only(p), chance, 0, first)


class _Only(JudgeOf):
    def __init__(self, p: FloatRow) -> None:
        self._p = p

    def p(self, row: int) -> FloatRow:
        return self._p


@pytest.mark.parametrize("wrong", [Forgetful(), WithReplacement(), NoTally()], ids=lambda rule: type(rule).__name__)
def test_a_rule_that_forgets_a_step_is_caught(wrong: Rule) -> None:
    shape = (((),), ((),))
    assert max(error(wrong, Language(3, PLAIN, seed=seed), shape, 3) for seed in range(5)) > 0.01


def kept(tree: Tree, keep: Any) -> Tree:
    """Only the nodes that a drafter or a wire lets through, and what hangs on them."""
    rows = [0]
    for row in range(1, len(tree.paths)):
        if tree.parents[row] in rows and keep(tree.paths[row]):
            rows.append(row)
    return Tree([tree.paths[row] for row in rows], [-1, *(rows.index(tree.parents[row]) for row in rows[1:])])


@pytest.mark.parametrize("name", [*TREES, *CHAINS])
@pytest.mark.parametrize("mistake", ["pruned by q", "late by value"])
def test_dropping_a_drawn_token_by_its_value_biases_the_text(name: str, mistake: str) -> None:
    shape = chain_shape(2) if name in CHAINS else ((), ())

    def keep(path: Path, language: Language) -> bool:
        if mistake == "pruned by q":
            return float(language.q(path[:-1]).dense(3)[path[-1]]) > 0.3
        return path[-1] != 1

    worst = 0.0
    for seed in range(5):
        language = Language(3, PLAIN, seed=seed)
        law = law_of(
            rule(name),
            language,
            3,
            lambda chance, lang=language: kept(drawn(lang, shape, chance), lambda path: keep(path, lang)),
        )
        worst = max(worst, distance(law, language.law(3)))
    assert worst > 0.01


def test_another_q_than_was_drawn_from_biases_the_text() -> None:
    """As if the whole distribution were shipped and the rounded one drawn from."""

    class Shipped(JudgeOf):
        def q(self, row: int) -> FloatRow:
            q = super().q(row) ** 0.8
            return q / q.sum()

    language = Language(3, PLAIN, seed=1)
    for name in (*TREES, *CHAINS):
        draw = lambda chance: drawn(language, chain_shape(2), chance)  # noqa: E731
        assert distance(law_of(rule(name), language, 3, draw, judge=Shipped), language.law(3)) > 1e-3


def test_noise_that_draft_and_verdict_share_biases_the_text() -> None:
    """One uniform number for both draws, over a fine grid of its values."""

    class Shared(Tape):
        def __init__(self, u: float) -> None:
            super().__init__([])
            self._u = u

        def happens(self, probability: float) -> bool:
            return self._u < probability

        def pick(self, weights: FloatRow) -> int:
            return int(np.searchsorted(np.cumsum(weights) / weights.sum(), self._u))

    language, grid = Language(3, PLAIN, seed=2), 2000
    for name in ("recursive-rejection", "traversal-verification"):
        counts = np.zeros(3)
        for step in range(grid):
            walked = walk_of(rule(name), language, chain_shape(1), Shared((step + 0.5) / grid))
            counts[walked.choices[0].token] += 1 / grid
        assert abs(counts - language.p(())).sum() / 2 > 0.02


def test_top_tokens_are_not_draws() -> None:
    """Rejection over a tree of the likeliest tokens, as some implementations do it, is biased."""

    def top(language: Language) -> Tree:
        best = int(np.argmax(language.q(()).dense(3)))
        return Tree([(), (best,)], [-1, 0])

    worst = max(
        distance(law_of(rule("recursive-rejection"), language, 2, lambda _, lang=language: top(lang)), language.law(2))
        for language in (Language(3, PLAIN, seed=seed) for seed in range(4))
    )
    assert worst > 0.02
    assert rule("recursive-rejection").child_sampling is ChildSampling.SAMPLED


@pytest.mark.parametrize("lenience", [0.8, 0.3])
def test_lenience_accepts_more_and_makes_no_token_more_than_that_much_likelier(lenience: float) -> None:
    lenient = rule_of(Contract(seed=0, max_tokens=1, rule="lenient-speculative-sampling", lenience=lenience))
    strict = rule("speculative-sampling")
    lossy = 0.0
    for seed in range(6):
        language = Language(3, PLAIN, seed=seed)
        law = law_of(lenient, language, 1, lambda chance, lang=language: drawn(lang, chain_shape(1), chance))
        lossy = max(lossy, distance(law, language.law(1)))
        for path, chance in language.law(1).items():
            assert law[path] < chance / lenience + 1e-12
        assert expected(lenient, language, chain_shape(2)) >= expected(strict, language, chain_shape(2)) - 1e-12
    assert lossy > 0.01
    same = rule_of(Contract(seed=0, max_tokens=1, rule="lenient-speculative-sampling", lenience=1.0))
    assert error(same, Language(3, PLAIN, seed=3), chain_shape(3), 4) < 1e-9


def test_typical_acceptance_is_lossy_and_takes_the_longest_path_of_likely_tokens() -> None:
    typical = rule("typical-acceptance")
    assert Contract(seed=0, max_tokens=1, rule=typical.name).lossy
    language = Language(3, PLAIN, seed=4)
    paths: list[Path] = [(), (0,), (1,), (2,), (0, 0), (1, 1), (2, 0), (2, 0, 1)]
    tree = Tree(paths, [-1, *(paths.index(path[:-1]) for path in paths[1:])])

    def good(path: Path) -> bool:
        p = language.p(path[:-1])
        return bool(p[path[-1]] > min(0.09, 0.3 * np.exp((p * np.log(p)).sum())))

    longest = max(len(path) for path in paths if all(good(path[:end]) for end in range(1, len(path) + 1)))
    for _, walked in outcomes(lambda chance: typical.walk(tree.rows, JudgeOf(language, tree), chance)):
        assert len(walked.path) == longest
    assert distance(law_of(typical, language, 2, lambda _: tree), language.law(2)) > 0.05


class Noted(JudgeOf):
    """Records which token is chosen after which row."""

    def __init__(self, language: Language, tree: Tree) -> None:
        super().__init__(language, tree)
        self.after: list[tuple[int, int]] = []

    def choice_of(self, row: int, token: int) -> Choice:
        self.after.append((row, token))
        return super().choice_of(row, token)


def test_a_walk_judges_each_token_at_the_row_that_it_follows() -> None:
    tree = Tree([(), (0,), (1,), (1, 2), (1, 2, 0)], [-1, 0, 0, 2, 3])
    judge = Noted(Language(3, PLAIN), tree)
    walked = accepted_walk(tree.rows, judge, [2, 3], 7)
    assert judge.after == [(0, 1), (2, 2), (3, 7)]
    assert (walked.path, [choice.token for choice in walked.choices]) == ([2, 3], [1, 2, 7])
    judge.after.clear()
    assert accepted_walk(tree.rows, judge, [], 5).path == []
    assert judge.after == [(0, 5)]
    judge.after.clear()
    rule("target-match").walk(tree.rows, judge, Tape([1, 2, 1]))
    assert judge.after == [(0, 1), (2, 2), (3, 1)]


def test_typical_acceptance_takes_the_likeliest_of_the_longest_paths() -> None:
    language = Language(3, PLAIN)
    rows = {(): [0.5, 0.3, 0.2], (0,): [0.2, 0.6, 0.2], (1,): [0.1, 0.1, 0.8], (2,): [0.5, 0.3, 0.2]}
    language.p = lambda path: np.array(rows.get(path, [0.0, 0.0, 1.0]))  # type: ignore[method-assign]
    paths: list[Path] = [(), (2,), (0,), (1,), (2, 0), (0, 1), (1, 2), (0, 0)]
    tree = Tree(paths, [-1, *(paths.index(path[:-1]) for path in paths[1:])])
    low = rule_of(Contract(seed=0, max_tokens=1, rule="typical-acceptance", typical_epsilon=0.01, typical_delta=0.01))
    walked = low.walk(tree.rows, JudgeOf(language, tree), Tape([]))
    assert [paths[row] for row in walked.path] == [(0,), (0, 1)]  # 0.3, against 0.24 and 0.1
    assert [choice.token for choice in walked.choices] == [0, 1, 2]
    # Exactly as likely as the threshold is not likely enough.
    strict = rule_of(Contract(seed=0, max_tokens=1, rule="typical-acceptance", typical_epsilon=0.5, typical_delta=1.0))
    rows = {(): [0.5, 0.5, 0.0]}
    walked = strict.walk(tree.rows, JudgeOf(language, tree), Tape([]))
    assert (walked.path, [choice.token for choice in walked.choices]) == ([], [0])


def test_typical_acceptance_asks_for_less_where_the_target_is_unsure() -> None:
    language = Language(4, PLAIN)
    tree = Tree([(), (1,)], [-1, 0])
    typical = rule_of(Contract(seed=0, max_tokens=1, rule="typical-acceptance", typical_epsilon=0.9, typical_delta=0.5))
    for p, taken in (([0.4, 0.2, 0.2, 0.2], True), ([0.8, 0.2, 0.0, 0.0], False)):
        language.p = lambda path, p=p: np.array(p)  # type: ignore[method-assign, misc]
        threshold = min(0.9, 0.5 * np.exp(sum(x * np.log(x) for x in p if x)))
        assert (threshold < 0.2) == taken
        assert bool(typical.walk(tree.rows, JudgeOf(language, tree), Tape([])).path) == taken


def test_chance_is_drawn_from_its_key_in_53_bits() -> None:
    key = mix64(mix64(mix64(8 * PHI) + 1 * PHI) + 3 * PHI)  # of 7, 0 and 2
    numbers = [(mix64(key + turn * PHI) >> 11) / 2**53 for turn in range(1, 5)]
    above, at = SeededRandom(7, 0, 2), SeededRandom(7, 0, 2)
    assert all(above.happens(np.nextafter(number, 1)) for number in numbers)
    assert not any(at.happens(number) for number in numbers)
    chance = SeededRandom(7, 0, 2)
    assert chance.happens(np.nextafter(numbers[0], 1))
    assert not chance.happens(numbers[1])
    assert chance.pick(np.array([numbers[2], 1 - numbers[2]])) == 1  # at the edge: the next one's
    assert chance.pick(np.array([2 * np.nextafter(numbers[3], 1), 0.0, 2 * (1 - numbers[3])])) == 0
    weights = np.array([1.0, 0.0, 3.0])
    picked = [SeededRandom(seed).pick(weights) for seed in range(2000)]
    assert set(picked) == {0, 2}
    assert picked.count(2) / 2000 == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 2000))


def test_rounding_never_picks_a_token_without_weight() -> None:
    class Late(SeededRandom):
        def _uniform(self) -> float:
            return 0.75  # of the smallest number, which rounds to all of it

    assert Late().pick(np.array([0.0, 5e-324, 0.0])) == 1


def test_a_sparse_row_has_the_likeliest_tokens_up_to_its_mass_and_its_maximum() -> None:
    p = np.array([0.1, 0.4, 0.2, 0.3])
    assert SparseRow.of(p, mass=0.69).tokens == (1, 3)
    assert SparseRow.of(p, mass=0.71).tokens == (1, 2, 3)
    assert SparseRow.of(p, max_tokens=1).tokens == (1,)
    assert SparseRow.of(p) == SparseRow((0, 1, 2, 3), (16384, 65535, 32768, 49151))
    alike = [token for token in range(1500) if token % 3]
    flat = SparseRow.of(np.where(np.isin(np.arange(1500), alike), 0.001, 0.0))
    assert (flat.tokens, set(flat.weights)) == (tuple(alike[:512]), {65535})  # of those alike the first
    assert SparseRow.of(np.array([1 - 7e-6, 7e-6]), mass=1.0).tokens == (0,)  # a weight of less than a half
    assert SparseRow.of(np.array([1 - 2e-5, 2e-5]), mass=1.0) == SparseRow((0, 1), (65535, 1))


class Fixed(JudgeOf):
    """The same p and q after every row."""

    def __init__(self, p: FloatRow, q: FloatRow) -> None:
        self._p, self._q = p, q

    def p(self, row: int) -> FloatRow:
        return self._p

    def q(self, row: int) -> FloatRow:
        return self._q


def test_the_target_still_gives_a_token_where_rounding_leaves_no_residual() -> None:
    q = np.array([0.5, 0.5])
    p = np.array([0.5, np.nextafter(0.5, 0)])  # nothing of it is beyond q
    never = Tape([0])  # rejects what has a chance of all but 1
    walked = rule("traversal-verification").walk(VerifiedRows([-1, 0], [-1, 1]), Fixed(p, q), never)
    assert (walked.path, [choice.token for choice in walked.choices]) == ([], [0])
    assert residual(p, q) is p
    assert residual(q, p).tolist() == [0.0, 1.0]


def test_a_draw_returns_at_most_the_tokens_of_its_row() -> None:
    row = SparseRow((3, 5), (1, 2))
    assert sorted(row.draw(9, SeededRandom(1))) == [3, 5]
    assert row.draw(0, SeededRandom(1)) == []


def test_the_drafter_draws_from_the_distribution_that_it_sends() -> None:
    p = np.array([0.5, 0.25, 0.2, 0.05 - 1e-7, 1e-7])
    row = SparseRow.of(p, max_tokens=4)
    assert row.tokens == (0, 1, 2, 3)
    assert row.weights[0] == 65535
    assert row.dense(5) == pytest.approx([0.5, 0.25, 0.2, 0.05, 0.0], abs=1e-4)
    law = dict.fromkeys(range(4), 0.0)
    for chance, tokens in outcomes(lambda chance: row.draw(3, chance)):
        assert len(set(tokens)) == 3
        law[tokens[0]] += chance
    assert list(law.values()) == pytest.approx(row.dense(5)[:4], abs=1e-12)
    assert (
        accepted_walk(VerifiedRows([-1], [0]), JudgeOf(Language(2, PLAIN), Tree([()], [-1])), [], 1).choices[0].token
        == 1
    )


class Deceived:
    """After each row x = 0 has p = 0.00023, and a drafter claims to have drawn it from q = {x: 1, y: 65535}."""

    def choose(self, row: int) -> Choice:
        raise AssertionError("there is no shared noise here")

    def p(self, row: int) -> FloatRow:
        return np.array([0.00023, 0.49977, 0.5])

    def q(self, row: int) -> FloatRow:
        return SparseRow((0, 1), (1, 65535)).dense(3)

    def choice_of(self, row: int, token: int) -> Choice:
        return Choice(token, float("nan"))


@pytest.mark.parametrize("name", [name for name in RULES if rule(name).child_sampling is ChildSampling.SAMPLED])
def test_a_drafter_that_did_not_draw_decides_the_text(name: str) -> None:
    """Why the verifier takes trusted drafters alone under these rules (docs/decisions/0023-who-draws.md)."""
    rows = VerifiedRows([-1, 0, 1], [-1, 0, 0])
    for seed in range(200):
        walk = rule(name).walk(rows, Deceived(), SeededRandom(seed))
        assert [choice.token for choice in walk.choices[:2]] == [0, 0]


def test_a_drafter_that_picks_its_tokens_decides_nothing_under_target_match() -> None:
    rows = VerifiedRows([-1, 0, 1], [-1, 0, 0])
    walks = [rule("target-match").walk(rows, Deceived(), SeededRandom(seed)) for seed in range(200)]
    assert sum(walk.choices[0].token == 0 for walk in walks) < 3
