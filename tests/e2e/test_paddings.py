"""Models of one family whose vocabularies are padded differently draft for each other; the text stays the target's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import OFF, Contract, Plan, PlanOverlap
from outrider.engine.checkpoints.checkpoint import UNPADDED
from outrider.engine.heads.checkpoint_io import load_network, save_network
from outrider.errors import InvalidRequest
from outrider.fleet.cluster import LocalCluster
from tests.e2e.distribution import Sample, corrected, p_values
from tests.e2e.mini_router import SPECULATE, Answer, decode, detach, trust
from tests.e2e.test_distribution import RARELY, SEED, law
from tests.e2e.test_tiers import attach_below
from tests.e2e.tiny_models import VOCABULARY, make_tiny
from tests.engine.small_checkpoints import pad_vocabulary
from tests.engine.taught import greedy, taught_heads

pytestmark = pytest.mark.asyncio(loop_scope="session")

PADDED = 24
TOKENS = 48
AT_ONCE = 4
ROUNDS = Plan(version=1, depth=4, width=3, nodes=12, wait_us=2_000_000, overlap=PlanOverlap.ROUNDS)
DRAWN = ["speculative-sampling", "recursive-rejection", "block-verification", "traversal-verification"]
PROMPTS = {"small": [3, 1, 4], "large": [3, 17, 1, 23, 4], "masked": [3, 1, 4]}


@dataclass(frozen=True, slots=True)
class Folders:
    """Of models with one tokenizer. The padded target often picks its further ids; the padded drafter prefers them."""

    small: Path
    large: Path
    masked: Path  # the small one with further ids that it cannot pick
    drafter: Path
    padded: Path
    heads: Path  # for the masked target, with some of its further ids in a head of their own
    features: Path  # EAGLE heads that know a text of the large target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("paddings")
    small = make_tiny(root / "small", layers=2, width=32)
    drafter = make_tiny(root / "drafter", layers=2, width=32, astray=0.1)
    large = pad_vocabulary(small, root / "large", PADDED, loudness=1.05)
    taught_heads("eagle", large, root / "features", greedy(large, PROMPTS["large"], TOKENS))
    taught_heads("medusa", small, root / "medusa", greedy(small, PROMPTS["small"], TOKENS))
    shape, network = load_network(root / "medusa")
    for head in network.heads:  # type: ignore[union-attr]
        table = head.weight.data
        head.weight.data = torch.cat([table, 2.0 * table[:5]])
    save_network(root / "heads", replace(shape, vocabulary=VOCABULARY + 5), network)
    masked = pad_vocabulary(small, root / "masked", PADDED, loudness=1.5)
    config = json.loads((masked / "config.json").read_text(encoding="utf-8"))
    (masked / "config.json").write_text(json.dumps(config | {UNPADDED: VOCABULARY}), encoding="utf-8")
    padded = pad_vocabulary(drafter, root / "padded", PADDED, loudness=1.5)
    return Folders(small, large, masked, drafter, padded, root / "heads", root / "features")


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster(folders: Folders) -> AsyncIterator[LocalCluster]:
    """Two targets, and one with heads; drafters 0 to 3 are for them, 4 and 5 for drafters 0 and 1."""
    it: dict[str, Any] = {"dtype": "float32", "slots": 8}
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0",
            models={name: getattr(folders, name) for name in VERIFIERS},
            overlap=True,
            policy="fixed",
        ),
        verifier=[
            VerifierConfig(model=folders.small, name="small", **it),
            VerifierConfig(model=folders.large, name="large", features=folders.features, **it),
            VerifierConfig(model=folders.masked, name="masked", heads=folders.heads, **it),
        ],
        tier={
            0: [
                DrafterConfig(model=folders.drafter, **it),
                DrafterConfig(model=folders.padded, **it),
                DrafterConfig(model=folders.drafter, drafts="suffix", slots=8),
                DrafterConfig(model=folders.small, heads=folders.features, **it),
            ],
            1: [DrafterConfig(model=folders.padded, **it), DrafterConfig(model=folders.drafter, **it)],
        },
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        await trust(running)
        yield running


def at(cluster: LocalCluster, name: str) -> str:
    return cluster.processes[name].address


VERIFIERS = {"small": "verifier-0", "large": "verifier-1", "masked": "verifier-2"}
DRAFTERS = {"drafter": "drafter-0", "padded": "drafter-1", "suffix": "drafter-2", "heads": "drafter-3"}
TERMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1},
]


async def pair(
    cluster: LocalCluster, target: str, drafter: str, terms: Mapping[str, Any], seed: int = 7
) -> tuple[list[int], Answer]:
    """The tokens of the target by itself, and with a drafter that every step waits for."""
    contract = Contract(seed=seed, max_tokens=TOKENS, **terms)
    verifier, prompt = at(cluster, VERIFIERS[target]), PROMPTS[target]
    plain = await decode(verifier, prompt, replace(contract, rule="shared-noise"), plan=OFF)
    drafts = await decode(verifier, prompt, contract, plan=ROUNDS, drafters=[at(cluster, DRAFTERS[drafter])], pace=0.01)
    return plain.tokens, drafts


@pytest.mark.parametrize("drafter", ["drafter", "padded", "suffix"])
@pytest.mark.parametrize("target", ["small", "large"])
async def test_the_text_is_the_target_s_and_drafts_are_accepted(
    cluster: LocalCluster, target: str, drafter: str
) -> None:
    accepted, drafts_seen = 0, set[int]()
    for terms in TERMS:
        plain, drafts = await pair(cluster, target, drafter, terms)
        assert drafts.tokens == plain
        accepted += drafts.accepted
        drafts_seen |= {*drafts.tokens}
    assert accepted > (2 if drafter == "suffix" else 12)
    assert (max(drafts_seen) >= VOCABULARY) == (target == "large")


NAMED: list[dict[str, Any]] = [
    {"allowed_ids": (17, 19, 23)},
    {"banned_ids": (1, 17), "logit_bias": {20: 4.0, 3: 1.0}},
    {"stop_ids": (16, 17, 18, 0), "min_tokens": TOKENS},
]


@pytest.mark.parametrize("drafter", ["drafter", "padded"])
async def test_a_contract_may_name_ids_that_the_drafter_lacks(cluster: LocalCluster, drafter: str) -> None:
    for terms in NAMED:
        plain, drafts = await pair(cluster, "large", drafter, terms)
        assert drafts.tokens == plain
        assert drafts.accepted > 0 or (drafter == "drafter" and "allowed_ids" in terms)


async def test_padding_changes_acceptance_hardly(cluster: LocalCluster) -> None:
    """But for what each drafter has learned of its scores."""
    accepted = dict.fromkeys(("drafter", "padded"), 0)
    for seed in range(3):
        for drafter in accepted:
            plain, drafts = await pair(cluster, "small", drafter, {"temperature": seed / 2}, seed)
            assert drafts.tokens == plain
            accepted[drafter] += drafts.accepted
    assert accepted["padded"] == pytest.approx(accepted["drafter"], rel=0.2)
    assert accepted["drafter"] > TOKENS


@pytest.mark.parametrize("rule", DRAWN)
async def test_rules_that_draw_from_q_give_the_targets_greedy_text(cluster: LocalCluster, rule: str) -> None:
    for target, drafter in (("small", "padded"), ("large", "drafter")):
        plain, drafts = await pair(cluster, target, drafter, {"temperature": 0.0, "rule": rule})
        assert drafts.tokens == plain
        assert drafts.accepted > 5


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        pytest.param(DRAWN[-1], 10, id="320"),
        *(
            pytest.param(rule, 100, id=f"{rule}-3200", marks=[pytest.mark.long, pytest.mark.timeout(600)])
            for rule in DRAWN
        ),
    ],
)
@pytest.mark.parametrize(("target", "drafter"), [("small", "padded"), ("large", "drafter")])
async def test_texts_of_rules_that_draw_from_q_follow_the_targets_distribution(
    cluster: LocalCluster, folders: Folders, rule: str, count: int, target: str, drafter: str
) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(seed: int) -> Answer:
        async with room:
            return (await pair(cluster, target, drafter, {"rule": rule}, seed))[1]

    answers = await asyncio.gather(*map(answer, range(count)))
    assert sum(it.accepted for it in answers) > count * TOKENS / 10
    texts = [it.tokens for it in answers]
    found = p_values(sample_of(texts, getattr(folders, target), folders.drafter, PROMPTS[target]), SEED)
    assert corrected(found) > RARELY, found


def sample_of(committed: Sequence[Sequence[int]], target: Path, drafter: Path, prompt: Sequence[int]) -> Sample:
    """Texts, and the laws of target and drafter for each token; `drafter`: without padding."""
    texts = np.array(committed)
    p = law(target, texts, prompt)
    q = np.zeros_like(p)
    known = np.minimum(texts, VOCABULARY - 1), np.minimum(prompt, VOCABULARY - 1).tolist()
    q[..., :VOCABULARY] = law(drafter, *known)
    second = law(target, np.array([[token, 0] for token in range(p.shape[-1])]), prompt)[:, 1]
    return Sample(texts, p, q, p[0, 0][:, None] * second)


@pytest.mark.parametrize("target", ["small", "large"])
@pytest.mark.parametrize(("upper", "lower"), [("drafter-0", "drafter-4"), ("drafter-1", "drafter-5")])
async def test_tiers_may_have_other_paddings_than_each_other(
    cluster: LocalCluster, target: str, upper: str, lower: str
) -> None:
    """A lower tier with more ids than the one above it, or fewer."""
    credited = 0
    verifier, prompt = at(cluster, VERIFIERS[target]), PROMPTS[target]
    for temperature in (0.0, 1.0):
        contract = Contract(seed=3, max_tokens=TOKENS, temperature=temperature)
        plain = await decode(verifier, prompt, contract, plan=OFF)
        session = f"tiers-{target}-{upper}-{temperature}"
        name = await attach_below(at(cluster, lower), at(cluster, upper), session)
        drafters = [at(cluster, upper)]
        result = await decode(verifier, prompt, contract, plan=ROUNDS, drafters=drafters, session=session, pace=0.01)
        for drafter in (upper, lower):
            await detach(at(cluster, drafter), session)
        assert result.tokens == plain.tokens
        assert result.accepted > 0
        credited += result.credited[name]
    assert credited > 0


async def test_heads_with_another_padding_draft_in_the_verifier(cluster: LocalCluster) -> None:
    for temperature in (0.0, 1.0):
        contract = Contract(seed=3, max_tokens=TOKENS, temperature=temperature)
        plain = await decode(at(cluster, "verifier-2"), PROMPTS["masked"], contract, plan=OFF)
        result = await decode(at(cluster, "verifier-2"), PROMPTS["masked"], contract, plan=SPECULATE)
        assert result.tokens == plain.tokens
        assert result.accepted > 0 or temperature


async def test_ids_that_the_target_cannot_pick_are_not_drafted(cluster: LocalCluster) -> None:
    for terms in (*TERMS, {"temperature": 0.0, "rule": "traversal-verification"}):
        small, _ = await pair(cluster, "small", "padded", terms)
        plain, drafts = await pair(cluster, "masked", "padded", terms)
        assert drafts.tokens == plain == small
        assert drafts.accepted > 5
    with pytest.raises(InvalidRequest, match="no token to choose"):
        await pair(cluster, "masked", "padded", {"allowed_ids": (VOCABULARY, PADDED - 1)})


async def test_remote_heads_draft_for_a_target_with_another_padding(cluster: LocalCluster) -> None:
    accepted = 0
    for terms in TERMS:
        plain, drafts = await pair(cluster, "large", "heads", terms)
        assert drafts.tokens == plain
        accepted += drafts.accepted
    assert accepted > 5


@pytest.mark.parametrize("target", VERIFIERS)
async def test_through_a_router_drafters_of_any_padding_are_placed(cluster: LocalCluster, target: str) -> None:
    """So small a target may be through before a drafter has begun: it is asked again."""
    terms: dict[str, Any] = {"model": target, "max_tokens": 120, "ignore_eos": True, "temperature": 0.7}
    drafted = 0
    async with outrider.AsyncClient(cluster.router_address) as client:
        for seed in range(5):
            plain = await client.generate(PROMPTS[target], speculation="off", seed=seed, **terms)
            fast = await client.generate(PROMPTS[target], speculation="rounds", seed=seed, **terms)
            assert (fast.token_ids, fast.text) == (plain.token_ids, plain.text)
            drafted += fast.usage.verified
            if drafted and seed:
                break
    assert drafted > 0
