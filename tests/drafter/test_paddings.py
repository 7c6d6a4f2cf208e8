"""Drafter and target have one tokenizer and different numbers of ids: what one of them lacks is not drafted, and the
rest is drafted as if they had equally many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_svc.sessions.eagle_session import EagleSampledSession, EagleTopKSession
from drafter_svc.sessions.sampled_session import SampledSession
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.sessions.topk_session import TopKSession
from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction.expansion import CANDIDATES, DrafterFits
from outrider.core.session.contract import RULES, Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.delta import Delta, Hints
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.candidates import row_candidates
from outrider.engine.interface.logits import BestTokens, HostLogits, LogitsRow, logits_rows
from outrider.engine.interface.settings import EngineSettings
from tests.e2e.tiny_models import make_tiny
from tests.engine.gpu.taped import taped
from tests.engine.small_checkpoints import pad_vocabulary

SHARED = 100  # ids that both sides have
PADDED = 130  # of the side that has more
PROMPT = (3, 1, 4, 1, 5)
PLAN = Plan(version=1, depth=5, width=3, nodes=12)
LOUD = 40.0  # above all other logits
DRAWN = [
    rule for rule in RULES if rule_of(Contract(seed=0, max_tokens=1, rule=rule)).child_sampling is ChildSampling.SAMPLED
]


def begun(contract: Contract, *, drafter: int, target: int, heads: bool = False, prompt: Sequence[int] = PROMPT) -> Any:
    """A session of a drafter with `drafter` ids for a target with `target`."""
    snapshot = MirrorSnapshot(tuple(prompt), extend(EMPTY, prompt), contract, PLAN, 10_000, unpadded_vocabulary=target)
    if rule_of(contract).child_sampling is ChildSampling.SAMPLED:
        return (EagleSampledSession if heads else SampledSession)(snapshot, 0, drafter)
    return (EagleTopKSession if heads else TopKSession)(snapshot, 0, drafter)


def row(text: Sequence[int], ids: int) -> NDArray[np.float32]:
    """Logits of the shared ids by a text's end; further ones are louder than all of them."""
    random = np.random.default_rng([*text[-3:]])
    return np.concatenate([random.normal(0, 2, SHARED), np.full(ids - SHARED, LOUD)]).astype(np.float32)


def levels(session: DrafterSession, ids: int, fits: DrafterFits, count: int = 8) -> list[Delta]:
    """What the session sends, level by level; its model reads ids that it has."""
    deltas = []
    for _ in range(count):
        chosen = session.next_segment(fits, chunk=64, limit=8, context=500, rows=600)
        if chosen is None:
            break
        segment, nodes = chosen
        assert segment.tokens.max() < ids
        session.advance(segment, nodes)
        logits = np.array([row(session.tokens + session.tree.path(node), ids) for node in nodes])
        deltas.append(session.expand(nodes, logits_rows(HostLogits(logits), 0, len(nodes)), fits))
    return deltas


def drafted(session: DrafterSession, ids: int, commits: Sequence[Sequence[int]]) -> list[Delta]:
    """All that the session sends, before and after each commit."""
    fits = DrafterFits()
    deltas = levels(session, ids, fits)
    for tokens in commits:
        session.commit(tokens)
        session.learn(fits)
        deltas += [session.refill(fits), *levels(session, ids, fits)]
        session.tree.check_integrity()
    assert session.tree.digest == extend(EMPTY, session.tokens)
    return deltas


TERMS: list[dict[str, Any]] = [
    *({"rule": rule, "temperature": 1.0} for rule in RULES),
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"allowed_ids": (1, 5, 9, 60), "rule": "recursive-rejection"},
    {"banned_ids": (7, 8), "logit_bias": {9: 3.0}, "stop_ids": (0,), "min_tokens": 4},
]


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_a_drafter_with_more_padding_sends_the_nodes_of_one_of_the_targets_size(
    terms: dict[str, Any], heads: bool
) -> None:
    contract = Contract(seed=4, max_tokens=100, **terms)
    commits = [(5, 9), (60,), (1, 5, 9, 60)]
    expected = drafted(begun(contract, drafter=SHARED, target=SHARED, heads=heads), SHARED, commits)
    ours = drafted(begun(contract, drafter=PADDED, target=SHARED, heads=heads), PADDED, commits)
    assert ours == expected
    tokens = [token for delta in ours for token in delta.tokens]
    assert len(tokens) > 10
    assert max(tokens) < SHARED


FOREIGN = (SHARED, SHARED + 7, PADDED - 1)  # ids that a smaller drafter lacks
NAMED: list[dict[str, Any]] = [
    *({"rule": rule} for rule in RULES),
    {"temperature": 0.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logit_bias": {5: 1.0, **dict.fromkeys(FOREIGN, 50.0)}},
    {"banned_ids": (7, *FOREIGN), "stop_ids": (3, *FOREIGN), "min_tokens": 5},
    {"allowed_ids": (1, 5, 9, *FOREIGN)},
    {"allowed_ids": (1, 5, 9, *FOREIGN), "rule": "traversal-verification"},
]


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("terms", NAMED, ids=str)
def test_a_smaller_drafter_drafts_on_past_ids_that_it_lacks(terms: dict[str, Any], heads: bool) -> None:
    prompt, commits = (3, FOREIGN[0], 4, FOREIGN[1], 5), [(5, FOREIGN[2]), (FOREIGN[0],), (1, 5, FOREIGN[1], 5)]
    contract = Contract(seed=4, max_tokens=100, **terms)
    deltas = drafted(begun(contract, drafter=SHARED, target=PADDED, heads=heads, prompt=prompt), SHARED, commits)
    tokens = [token for delta in deltas for token in delta.tokens]
    assert len(tokens) > 10
    assert max(tokens) < SHARED
    # The ids that it lacks change nothing of what the others are worth to it.
    within = {
        name: {id_: by for id_, by in value.items() if id_ < SHARED}
        if name == "logit_bias"
        else tuple(id_ for id_ in value if id_ < SHARED)
        if name.endswith("_ids")
        else value
        for name, value in terms.items()
    }
    same = drafted(
        begun(replace(contract, **within), drafter=SHARED, target=PADDED, heads=heads, prompt=prompt), SHARED, commits
    )
    assert deltas == same


@pytest.mark.parametrize("rule", DRAWN)
def test_q_is_a_distribution_over_the_ids_that_both_models_have(rule: str) -> None:
    contract = Contract(seed=4, max_tokens=100, rule=rule)
    session = begun(contract, drafter=PADDED, target=SHARED)
    for delta in drafted(session, PADDED, []):
        for q in delta.drawn:
            assert max(q.tokens) < SHARED
            assert q.dense(SHARED).sum() == pytest.approx(1.0)
            assert len(q.tokens) > 20


@pytest.mark.parametrize("rule", ["shared-noise", "traversal-verification"])
def test_a_drafter_without_any_allowed_id_rests(rule: str) -> None:
    for terms in ({"allowed_ids": FOREIGN}, {"banned_ids": tuple(range(SHARED))}):
        session = begun(Contract(seed=4, max_tokens=100, rule=rule, **terms), drafter=SHARED, target=PADDED)
        deltas = drafted(session, SHARED, [(FOREIGN[0],), (FOREIGN[1],)])
        assert not any(delta.tokens for delta in deltas)
        assert session.next_segment(DrafterFits(), chunk=64, limit=8, context=500, rows=600) is None


def test_hints_of_ids_that_a_drafter_lacks_are_drafted_below() -> None:
    session = begun(Contract(seed=4, max_tokens=100, temperature=0.0), drafter=SHARED, target=PADDED)
    session.tree.hint(Hints(len(PROMPT) - 1, (-1, 0), (FOREIGN[1], FOREIGN[2]), (-0.0625, -0.0625)))
    deltas = levels(session, SHARED, DrafterFits())
    assert {FOREIGN[1], FOREIGN[2]} < {token for delta in deltas for token in delta.tokens}  # with their children
    hinted = session.tree.root.children[FOREIGN[1]].children[FOREIGN[2]]
    assert hinted.children
    assert max(hinted.children) < SHARED


def test_a_repetition_is_proposed_up_to_the_first_id_that_the_drafter_lacks() -> None:
    prompt = (1, 2, 3, 4, FOREIGN[0], 6, 7, 1, 2)
    for drafter, expected in ((PADDED, [3, 4, FOREIGN[0], 6, 7]), (SHARED, [3, 4])):
        session = begun(Contract(seed=4, max_tokens=100), drafter=drafter, target=PADDED, prompt=prompt)
        session.refill(DrafterFits())
        assert [node.token for _, node in session.tree.best_first(depth=9, width=9)] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_whose_best_ids_include_padding_are_ranked_again_by_the_session(
    temperature: float, tmp_path: Path
) -> None:
    target = 16
    folder = pad_vocabulary(make_tiny(tmp_path / "tiny", layers=1, width=32), tmp_path / "padded", 90, loudness=1.5)
    engine = DeviceEngine.load(folder, EngineSettings(device="cpu", dtype="float32", slots=1))
    taped(engine)
    contract = Contract(seed=7, max_tokens=200, temperature=temperature)
    deltas: dict[bool, list[Delta]] = {False: [], True: []}
    for ranks in deltas:
        session, fits = begun(contract, drafter=engine.unpadded_vocabulary, target=target), DrafterFits()
        for _ in range(5):  # bites: it ends before when everything is drafted
            chosen = session.next_segment(fits, chunk=64, limit=4, context=100, rows=120)
            if chosen is None:
                break
            segment, nodes = chosen
            session.advance(segment, nodes)
            logits = (
                engine.sample([segment], [session.draw(engine)], CANDIDATES)
                if ranks
                else HostLogits(engine.forward([segment]))
            )
            deltas[ranks].append(session.expand(nodes, logits_rows(logits, 0, len(nodes)), fits))
    assert [delta.tokens for delta in deltas[True]] == [delta.tokens for delta in deltas[False]]
    tokens = [token for delta in deltas[True] for token in delta.tokens]
    assert len(tokens) > 8
    assert max(tokens) < target


def test_padding_among_the_best_is_left_out_without_the_row() -> None:
    class Ranked(HostLogits):
        fetched = 0
        leading: Sequence[int] = ()

        def row(self, index: int) -> NDArray[np.float32]:
            Ranked.fetched += 1
            return super().row(index)

        def best(self, index: int) -> BestTokens | None:
            return BestTokens(np.array(self.leading), np.array([-1.0, -2.0, -3.0]))

    session = begun(Contract(seed=4, max_tokens=100), drafter=PADDED, target=SHARED)
    logits = Ranked(np.zeros((1, PADDED), np.float32))
    for leading, left, fetched in (([7, SHARED + 1, 5], [7, 5], 0), ([SHARED, SHARED + 2, SHARED + 1], None, 1)):
        Ranked.leading = leading
        found = row_candidates(LogitsRow(logits, 0), session.sampler, (), session.usable, noised=True)
        assert (found.tokens < SHARED).all()
        assert left is None or found.tokens.tolist() == left
        assert Ranked.fetched == fetched
