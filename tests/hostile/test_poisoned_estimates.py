"""A caller whose contract shapes the target's distribution teaches other sessions nothing, wherever sessions share.

Each learner is shown the same session twice: under a plain contract, where its shared estimates must change, and under
one that decides what drafts are worth, where they must not.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafter_svc.scheduler import DraftScheduler
from drafter_svc.translator import Translator
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.cost.plain_pace import PlainPace
from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.proposers.datastore import Datastore, write_datastore
from outrider.core.proposers.lookup import LookupMethod, Lookups
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import Contract, Plan, SentTerms, StepReport
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta
from outrider.engine.interface.logits import HostLogits, logits_rows
from outrider.store.training_samples import TrainingSampleStore
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1.types_pb2 import Heartbeat
from router import server
from router.drafters.warm_start import WarmStart
from tests.core.control.plant import SteeredSession
from tests.drafter.test_scheduler import VOCABULARY, Engine
from tests.router.fakes import FakeDrafter, FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, ask, collect, running_router, until
from verifier_svc.proposers.head_drafts import RoundTerms
from verifier_svc.proposers.head_proposer import SpeculatorProposer
from verifier_svc.proposers.ngram_proposer import SENDER, NgramProposers, ReadAllowance
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

TEXT = (1, 2, 3, 1, 2, 3, 1)
PLAN = Plan(version=1, depth=6, width=3, nodes=8)
POISON: dict[str, Any] = {"banned_ids": (9,)}

contracts = pytest.mark.parametrize("terms", [{}, POISON], ids=["plain", "poison"])


def contract(terms: dict[str, Any]) -> Contract:
    return Contract(seed=1, max_tokens=100, **terms)


class Estimates(pickle.Pickler):
    """Writes all that an object has learned: what cannot learn has its name alone."""

    def persistent_id(self, it: object) -> str | None:
        fixed = isinstance(it, Datastore | ReadAllowance | SimpleNamespace | FunctionType)
        return type(it).__name__ if fixed else None


def written(learner: object) -> bytes:
    file = io.BytesIO()
    Estimates(file).dump(learner)
    return file.getvalue()


def changed(learner: object, happens: Callable[[], object]) -> bool:
    before = written(learner)
    happens()
    return written(learner) != before


def scheduler(**proposers: Any) -> StepScheduler:
    engine: Any = SimpleNamespace(
        slots=8,
        treeless="",
        rewinds=True,
        memory=lambda *_: None,
        release=lambda *_: None,
        vocabulary=VOCABULARY,
        unpadded_vocabulary=VOCABULARY,
    )
    cost = CostModel([(1, 0.01), (64, 0.02)])
    return StepScheduler(engine, cost, prefill_chunk=64, max_nodes=64, publish=lambda *_: None, **proposers)


def opened(verifier: StepScheduler, terms: dict[str, Any]) -> VerifierSession:
    return verifier.sessions.open(SessionStart("s", "", 1, TEXT, len(TEXT), contract(terms), PLAN, 64))


@contracts
def test_a_poisoned_session_does_not_change_a_drafters_calibration(terms: dict[str, Any]) -> None:
    session, calibration = opened(scheduler(), terms), Calibration()
    subscription = session.subscribe(UpstreamStream("d", Heartbeat), 1, calibration)
    session.grant(subscription)

    def misses() -> None:
        session.graft(subscription, Delta(6, session.tree.digest, 1, (0,), (7,), (-0.01,)), 1.0, passing=False)
        session.calibrate_verified([*session.tree.root.children.values()], set())

    assert changed(calibration, misses) == (not terms)
    assert subscription.calibration.corrected(-0.01) < -0.01  # the session itself has learned


@contracts
def test_a_poisoned_session_does_not_change_arrival_estimates(terms: dict[str, Any]) -> None:
    verifier = scheduler()
    session = opened(verifier, terms)
    session.arrivals.arrived(0.5, 1.0, passing=False)  # its drafter does not begin any more

    def arrives() -> None:
        session.arrivals.restart(1.0, 1.0)
        session.arrivals.arrived(1.5, 4.0, passing=False)

    assert changed(verifier.learning.hold_policy.patterns(greedy=False), arrives) == (not terms)
    assert session.arrivals.learned == 1


@contracts
@pytest.mark.parametrize("ahead", [False, True])
def test_a_poisoned_session_does_not_change_a_verifiers_ngrams(ahead: bool, terms: dict[str, Any]) -> None:
    proposers = NgramProposers(Lookups("suffix", None), ahead=ahead)
    session = opened(scheduler(ngram_proposers=proposers), terms)
    session.propose_ngrams()
    assert changed(proposers, lambda: _commit_beside_the_tree(session)) == (not terms)


def _commit_beside_the_tree(session: VerifierSession) -> None:
    nodes = [node for node in session.tree.root.children.values() if node.claim is not None]
    assert nodes
    assert {node.claim[0] for node in nodes if node.claim} == {SENDER}
    session.calibrate_verified(nodes, set())
    session.commit([Choice(9, 1.0, b"")], StepReport(), now=1.0)


@contracts
@pytest.mark.parametrize("method", ["prompt-lookup", "retrieval"])
def test_a_poisoned_session_does_not_change_lookups(
    method: LookupMethod, tmp_path: Path, terms: dict[str, Any]
) -> None:
    store = None
    if method == "retrieval":
        write_datastore(tmp_path / "store", [TEXT * 3], tokenizer_digest=bytes(16), vocabulary=16)
        store = Datastore.open(tmp_path / "store", bytes(16))
    lookups = Lookups(method, store)
    lookup = lookups.begin("", contract({"temperature": 0.0, **terms}))
    lookup.extend(TEXT)
    lookup.propose(4, 4)
    assert changed(lookups, lambda: lookup.extend([2])) == (not terms)


@pytest.mark.parametrize("terms", [{}, {"top_k": 2}], ids=["plain", "poison"])
def test_a_poisoned_session_does_not_change_noise_mixtures(terms: dict[str, Any]) -> None:
    lookups = Lookups("suffix", None)
    lookup = lookups.begin("", contract(terms))

    def learns() -> None:
        for token in TEXT * 4:
            lookup.propose(4, 4)
            lookup.extend([token])

    assert changed(lookups, learns) == (not terms)


@contracts
def test_a_poisoned_session_does_not_change_the_fits_of_heads(terms: dict[str, Any]) -> None:
    speculator: Any = SimpleNamespace(depth=2, unpadded_vocabulary=VOCABULARY, open_slot=lambda *_: None)
    proposer = SpeculatorProposer(speculator, lambda: None, every=False)  # type: ignore[arg-type,return-value]
    session = opened(scheduler(head_proposer=proposer), terms)
    heads = session.heads
    assert heads is not None
    heads.begin(RoundTerms(session.tree, session.sampler, VOCABULARY, PLAN, 0.0))
    (row,) = logits_rows(HostLogits(np.arange(VOCABULARY, dtype=np.float32)[None] / 8), 0, 1)
    heads.propose(session.tree.root, 0, row)
    nodes = [*session.tree.root.children.values()]

    def settles() -> None:
        session.calibrate_verified(nodes, set())
        heads.settle(session.tree, nodes[:1], [nodes[0].token])

    assert changed(proposer, settles) == (not terms)


def test_a_poisoned_session_does_not_change_the_verifiers_overlap_mode() -> None:
    """While a plain session is open its tokens alone count; the others have estimates of their own."""
    cost = CostModel([(1, 0.01), (64, 0.02)])
    steering = Steering(Governor(PlainPace(cost.points())), cost)
    plain, poison = (
        SteeredSession(DraftingTerms(PLAN, drawn=False), representative=not terms) for terms in ({}, POISON)
    )

    def learn(sessions: Sequence[Any], tokens: Mapping[Any, int]) -> None:
        commits = [SessionTokens(session, count, 1.0) for session, count in tokens.items()]
        steering.on_step(sessions, commits, 0, 0.02)

    def loads(*, representative: bool) -> list[dict[str, Any]]:
        shown = steering.estimates()["loads"]
        return [load for load in shown if load["representative"] is representative]

    steering.on_opened([plain])
    for _ in range(40):
        learn([plain], {plain: 2})
    known = steering.governor.pace.estimates(), loads(representative=True)
    for _ in range(400):
        learn([poison], {poison: 1000 if poison.terms.resting else 1})
    assert loads(representative=False)[0]["usual"] == "rest"
    assert loads(representative=True) == known[1]
    for _ in range(40):
        learn([plain, poison], {poison: 1000})  # a step of the poison alone
    assert loads(representative=True) == known[1]


def drafts(terms: dict[str, Any]) -> tuple[DraftScheduler, Callable[[], Coroutine[Any, Any, None]]]:
    """A scheduler, and a session that drafts and is sent tokens that were not drafted."""
    engine: Any = Engine(context=1000)
    made = DraftScheduler(engine, level_nodes=8, prefill_chunk=64, send=lambda *_: None, resync=lambda _: None)

    async def commits() -> None:
        key, tokens = Attachment("s", "", 1, b""), [*TEXT]
        made.opened(key, MirrorSnapshot(tuple(tokens), extend(EMPTY, tokens), contract(terms), PLAN, 1000))
        running = asyncio.create_task(made.run())
        for token in (400, 401, 402):
            for _ in range(200):
                await asyncio.sleep(0.001)
                if made.members[key].session is not None and made.members[key].session.tree.size:  # type: ignore[union-attr]
                    break
            tokens.append(token)
            digest = extend(EMPTY, tokens)
            made.updated(key, MirrorUpdate(len(tokens) - 1, (token,), digest, None, SentTerms(), 2000, ()))
        for _ in range(200):
            await asyncio.sleep(0.001)
            own = made.members[key].fits
            if any(compared for _, compared in made.fits.agreement().values()) or (own is not None and own.compared):
                break
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    return made, commits


@contracts
async def test_a_poisoned_session_does_not_change_a_drafters_fits_and_agreement(terms: dict[str, Any]) -> None:
    made, commits = drafts(terms)
    await commits()
    (own,) = [member.fits for member in made.members.values()]
    compared = made.fits.agreement()["hot"][1]
    assert (compared > 0) == (not terms)
    assert (own is not None and own.compared > 0) == bool(terms)


@contracts
def test_a_drafter_that_translates_passes_on_whether_a_contract_is_representative(terms: dict[str, Any]) -> None:
    received: list[MirrorSnapshot] = []
    tokenizer = MODEL.tokenizer
    translator = Translator(tokenizer, tokenizer, send=lambda *_: None, resync=lambda _: None)
    translator.serve(SimpleNamespace(opened=lambda key, snapshot: received.append(snapshot)))  # type: ignore[arg-type]
    tokens = tokenizer.encode("def add(self, other):").ids
    snapshot = MirrorSnapshot(tuple(tokens), extend(EMPTY, tokens), contract(terms), PLAN, 100)
    translator.opened(Attachment("s", "", 1, b""), snapshot)
    assert [each.representative for each in received] == [not terms]
    assert received[0].contract.representative  # it names no tokens any more


async def test_a_poisoned_session_does_not_change_a_routers_priors_tiers_and_samples(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, books = TierSwitch(), list[WarmStart]()

    def warm_start(*given: Any) -> WarmStart:
        books.append(WarmStart(*given))
        return books[-1]

    monkeypatch.setattr(server, "TierSwitch", lambda **_: tiers)
    monkeypatch.setattr(server, "WarmStart", warm_start)
    verifier = FakeVerifier(SCRIPT, pace_s=0.002)
    verifier.elapsed_us = 2000
    async with (
        running_router(redis_url, teaches=["*"]) as rig,
        announced(verifier, rig.registry, MODEL.digest),
        announced(FakeDrafter(), rig.registry, MODEL.digest, tier=0),
        announced(FakeDrafter(), rig.registry, MODEL.digest, tier=1),
    ):
        samples = TrainingSampleStore(rig.client, MODEL.name, MODEL.digest)

        def steps() -> float:
            return sum(each["steps"] for each in books[0].estimates().values())

        def measured() -> int:
            """Windows of generations that sets of tiers were measured by."""
            return sum(arm["windows"] for each in tiers.estimates() for arm in each["arms"].values())

        async def written() -> int:
            return len((await samples.after("0", 100))[0])

        for plain in (1, 2):
            before = measured()
            await collect(rig.stub.Generate(ask(max_tokens=40, banned_ids=[9], logit_bias={8: 5.0})))
            assert (steps(), measured()) == (40 * (plain - 1), before)
            await collect(rig.stub.Generate(ask(max_tokens=40)))
            await until(lambda count=before: measured() > count)  # type: ignore[misc]
            async with asyncio.timeout(5):
                while await written() < plain:
                    await asyncio.sleep(0.002)
            assert (steps(), await written()) == (40 * plain, plain)
