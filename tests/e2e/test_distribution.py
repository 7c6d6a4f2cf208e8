"""A hundred thousand tokens at temperature 1, drafted, verified and sent over the wire, follow the exact law."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from scipy import stats

import outrider
from outrider.cli.cluster import LocalCluster
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.padding import pad_checkpoint
from tests.e2e.tiny import make_tiny

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [3, 1, 4]
TOKENS = 100  # of a text
AT_ONCE = 8
LEVEL = 0.01


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, the same padded so that a step takes time to draft in, and a drafter that is often right."""
    folder = tmp_path_factory.mktemp("tiny")
    target = make_tiny(folder / "target", layers=2, width=32)
    pad_checkpoint(target, folder / "padded", parameters=20_000_000)
    return target, folder / "padded", make_tiny(folder / "drafter", layers=2, width=32, astray=0.1)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def small(checkpoints: tuple[Path, Path, Path]) -> AsyncIterator[LocalCluster]:
    _, target, drafter = checkpoints
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
        verifier=[VerifierConfig(model=target, name="target", dtype="float32", slots=AT_ONCE)],
        drafter=[DrafterConfig(model=drafter, dtype="float32", slots=AT_ONCE)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


def law(checkpoint: Path, texts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the target's probabilities were at every position of the answers: [texts, TOKENS, vocabulary]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about itself
        import torch
        from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    prompts = np.tile(PROMPT, (len(texts), 1))
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate([prompts, texts[:, :-1]], axis=1))).logits
        p: NDArray[np.float64] = torch.softmax(logits[:, len(PROMPT) - 1 :], -1).numpy()
    return p


def uniforms(p: NDArray[np.float64], texts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The randomized probability integral transform: independent and uniform if, and only if, the texts follow p.

    Source: Smith, "Diagnostic checks of non-standard time series models", Journal of Forecasting 4 (1985), for the
    transform; its randomization for discrete laws is Brockwell's (2007).
    """
    below = np.cumsum(p, axis=-1) - p
    at = texts[..., None]
    spread = np.random.default_rng(5).random(texts.shape)
    u: NDArray[np.float64] = (np.take_along_axis(below, at, -1) + spread[..., None] * np.take_along_axis(p, at, -1))[
        ..., 0
    ]
    return u


def p_values(p: NDArray[np.float64], texts: NDArray[np.int64]) -> list[float]:
    """Chi-square: of all tokens, of neighbours (independence), and of the first two tokens' joint law."""
    u = uniforms(p, texts)
    bins = np.minimum((u * 100).astype(int), 99)
    each = stats.chisquare(np.bincount(bins.reshape(-1), minlength=100)).pvalue
    tens = bins // 10
    pairs = (tens[:, :-1:2] * 10 + tens[:, 1::2]).reshape(-1)
    neighbours = stats.chisquare(np.bincount(pairs, minlength=100)).pvalue
    return [each, neighbours]


def joint_p_value(first: NDArray[np.float64], second: NDArray[np.float64], texts: NDArray[np.int64]) -> float:
    """first [vocabulary], second [vocabulary, vocabulary]: the exact joint law of the first two tokens."""
    expected = (first[:, None] * second).reshape(-1) * len(texts)
    counts = np.bincount(texts[:, 0] * len(first) + texts[:, 1], minlength=expected.size)
    order = np.argsort(-expected)
    expected, counts = expected[order], counts[order]
    common = int((expected >= 5).sum())  # rarer pairs count as one cell
    cells = np.append(counts[:common], counts[common:].sum())
    return float(stats.chisquare(cells, np.append(expected[:common], expected[common:].sum())).pvalue)


@pytest.mark.parametrize(
    ("count", "power"),
    [
        pytest.param(100, 1.25, id="10000"),
        pytest.param(1000, 1.05, id="100000", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
async def test_tokens_over_the_wire_follow_the_exact_distribution(
    small: LocalCluster, checkpoints: tuple[Path, Path, Path], count: int, power: float
) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    async with outrider.AsyncClient(small.router_address) as client:

        async def text(seed: int) -> outrider.Generation:
            async with room:
                return await client.generate(
                    PROMPT, temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True, timeout=600
                )

        results = await asyncio.gather(*map(text, range(count)))
    assert sum(result.usage.accepted for result in results) > count
    texts = np.array([result.token_ids for result in results])
    assert texts.size == count * TOKENS
    p = law(checkpoints[0], texts)
    vocabulary = p.shape[-1]
    every = np.array([[token, 0] for token in range(vocabulary)])
    second = law(checkpoints[0], every)[:, 1]
    found = [*p_values(p, texts), joint_p_value(p[0, 0], second, texts)]
    assert min(found) * len(found) > LEVEL, found
    # The same tokens are not what a model says that is a little sharper.
    sharper = p**power
    sharper /= sharper.sum(axis=-1, keepdims=True)
    assert min(p_values(sharper, texts)) < 1e-6
