"""The gated delta rule: what transformers computes, in the same bits however passes cut and branch a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.features import Features
from outrider.engine.loading import load_engine
from tests.engine.contract import *  # noqa: F403 what every engine does
from tests.engine.contract import assert_alike
from tests.engine.families import HYBRIDS, make_family
from tests.engine.small_checkpoints import Reference, Tree, prompt, random_tokens

SLOTS = 6


def hybrid(folder: Path, name: str, **changes: Any) -> Engine:
    engine = load_engine(make_family(folder, name, **changes), dtype="float32", slots=SLOTS, threads=2)
    assert isinstance(engine, CpuEngine)
    return engine


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Reference]]:
    folder = tmp_path_factory.mktemp(request.param)
    engine, reference = hybrid(folder, request.param), Reference.load(folder, attention="eager")
    # Its form for chunks is farther from float64 than the engine is.
    modeling = sys.modules[type(reference.model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch_chunk_gated_delta_rule", modeling.torch_recurrent_gated_delta_rule)
        reference.slack = 10.0  # a norm is over a head's output, which may be small
        yield engine, reference


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3-5")


def test_a_text_has_the_same_bits_in_every_chunking(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    tokens = random_tokens(engine, np.random.default_rng(5), engine.context - 1)
    whole = engine.forward([prompt(0, tokens)])
    assert_alike(whole, reference.logits(tokens), reference.slack)
    for size in (1, 15, 16, 17, 50, 100):
        parts = [
            engine.forward([prompt(1, tokens[start : start + size], start)]) for start in range(0, len(tokens), size)
        ]
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("size", [1, 16, 31, 70, 100])
def test_text_that_is_read_without_logits_leads_to_the_same_bits(engine: Engine, size: int) -> None:
    tokens = random_tokens(engine, np.random.default_rng(6), engine.context - 1)
    whole = engine.forward([prompt(0, tokens)])
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        last = engine.forward([prompt(1, chunk, start, wanted=1)])
        assert np.array_equal(last[0], whole[start + len(chunk) - 1])


def path_logits(engine: Engine, text: NDArray[np.int64], tree: Tree, node: int) -> NDArray[np.float32]:
    """A node's logits where its path is a text of its own."""
    return engine.forward([prompt(5, np.concatenate([text, tree.tokens[tree.path(node)]]))])[-1]


@pytest.mark.parametrize("seed", range(12))
def test_random_trees_have_the_bits_of_their_paths(engine: Engine, seed: int) -> None:
    """Many of them reach over the ends of two or three blocks."""
    random = np.random.default_rng(seed)
    text = random_tokens(engine, random, int(random.integers(1, 60)))
    engine.forward([prompt(0, text, wanted=0)])
    for _ in range(4):
        nodes = int(random.integers(1, 41))
        parents = [node - 1 if random.random() < 0.8 else int(random.integers(-1, node)) for node in range(nodes)]
        tree = Tree(parents, random_tokens(engine, random, nodes))
        other = random_tokens(engine, random, int(random.integers(1, 40)))
        found = engine.forward([prompt(1, other), tree.segment(0, len(text))])[len(other) :]
        for node in range(nodes):
            assert np.array_equal(found[node], path_logits(engine, text, tree, node))
        path = tree.path(int(random.integers(-1, nodes)))[: max(0, 70 - len(text))]
        engine.move(0, len(text) + np.array(path, np.int64), len(text) + np.arange(len(path)))
        text = np.concatenate([text, tree.tokens[path]])
        again = engine.forward([prompt(0, text[-1:], len(text) - 1)])
        assert np.array_equal(again[0], engine.forward([prompt(5, text)])[-1])


def test_a_tree_that_grows_over_the_end_of_a_block(engine: Engine) -> None:
    """Its rows are computed one level at a time, with rows between them that no pass has computed."""
    random = np.random.default_rng(8)
    text, chain = random_tokens(engine, random, 29), random_tokens(engine, random, 24)
    engine.forward([prompt(2, text, wanted=0)])
    whole = engine.forward([prompt(3, np.concatenate([text, chain]))])[len(text) :]
    for level in range(len(chain)):
        row = 3 * level + 2
        mask = np.zeros((1, row + 1), np.bool_)
        mask[0, 2 : row + 1 : 3] = True
        segment = Segment(2, len(text), chain[level : level + 1], np.array([len(text) + level]), mask)
        assert np.array_equal(engine.forward([segment])[0], whole[level])


def test_a_rejected_chain_leaves_the_text_as_it_was(engine: Engine) -> None:
    random = np.random.default_rng(9)
    text, draft, last = (random_tokens(engine, random, count) for count in (37, 30, 20))
    engine.forward([prompt(0, text, wanted=0)])
    engine.forward([prompt(0, draft, len(text))])
    found = engine.forward([prompt(0, last, len(text))])
    assert np.array_equal(found, engine.forward([prompt(5, np.concatenate([text, last]))])[len(text) :])


def test_copies_go_their_own_ways(engine: Engine) -> None:
    random = np.random.default_rng(10)
    text = random_tokens(engine, random, 90)
    engine.forward([prompt(0, text, wanted=0)])
    for slot in (1, 2):
        engine.copy(0, slot, len(text))
    ends = {slot: random_tokens(engine, random, 25) for slot in (0, 1, 2)}
    found = engine.forward([prompt(slot, end, len(text)) for slot, end in ends.items()])
    for at, end in enumerate(ends.values()):
        alone = engine.forward([prompt(5, np.concatenate([text, end]))])[len(text) :]
        assert np.array_equal(found[at * 25 : at * 25 + 25], alone)


def test_what_a_slot_has_no_state_of_is_refused(engine: Engine) -> None:
    text = random_tokens(engine, np.random.default_rng(11), 90)
    engine.forward([prompt(0, text, wanted=0)])
    with pytest.raises(ValueError, match="the text before it is not kept"):
        engine.forward([prompt(0, text[:2], 20)])
    with pytest.raises(ValueError, match="rows that are not kept"):
        engine.copy(0, 1, 20)
    with pytest.raises(ValueError, match="position is not that of its path"):
        engine.forward([Segment(0, 0, text[:2], np.array([0, 3]))])
    with pytest.raises(ValueError, match="was not computed"):
        engine.forward([Segment(1, 0, text[:1], np.array([1]), np.ones((1, 2), np.bool_))])
    engine.forward([prompt(0, text)])


@pytest.mark.parametrize("seed", range(4))
def test_the_plain_recurrence_in_float64(tmp_path: Path, seed: int) -> None:
    """Of a layer with the rule and its feed-forward, over a random tree behind a text."""
    folder = make_family(tmp_path, "qwen3-5")
    features = Features((1,), all_rows=True)
    engine = load_engine(folder, dtype="float32", slots=1, threads=1, features=features)
    random = np.random.default_rng(seed)
    text = random_tokens(engine, random, int(random.integers(1, 50)))
    tree = Tree([node - 1 if random.random() < 0.7 else int(random.integers(-1, node)) for node in range(30)], text)
    tree.tokens = random_tokens(engine, random, 30)
    engine.forward([prompt(0, text, wanted=0)])
    engine.forward([tree.segment(0, len(text))])
    layer = Recurrence(folder)
    for node, found in enumerate(engine.hidden().double().numpy()):
        expected = layer.outputs([*text, *tree.tokens[tree.path(node)]])[-1]
        np.testing.assert_allclose(found, expected, atol=2e-5)


class Recurrence:
    """The first layer of a small Qwen 3.5 in float64, token by token."""

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self._config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._embedding = tensors["model.embed_tokens.weight"].double().numpy()
        prefix = "model.layers.0."
        self._of = {
            name.removeprefix(prefix): tensor.double().numpy()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    def outputs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """[tokens, width]: the embeddings, and what the layer adds to them."""
        stream = self._embedding[[*tokens]]
        stream = stream + self._rule(self._norm(stream, "input_layernorm"))
        inner = self._norm(stream, "post_attention_layernorm")
        gate, up = (inner @ self._of[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return stream + (silu(gate) * up) @ self._of["mlp.down_proj.weight"].T

    def _norm(self, rows: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return unit(rows, self._config["rms_norm_eps"]) * (1 + self._of[f"{name}.weight"])

    def _rule(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        raw = {name: self._of[f"linear_attn.{name}"] for name in ("A_log", "dt_bias")}
        mixed, z, b, a = (rows @ self._of[f"linear_attn.in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
        taps = self._of["linear_attn.conv1d.weight"][:, 0]
        padded = np.pad(mixed, ((taps.shape[1] - 1, 0), (0, 0)))
        mixed = silu(sum(padded[tap : tap + len(rows)] * taps[:, tap] for tap in range(taps.shape[1])))
        keys, values = self._config["linear_num_key_heads"], self._config["linear_num_value_heads"]
        size = self._config["linear_key_head_dim"]
        q, k, v = np.split(mixed, [keys * size, 2 * keys * size], axis=1)
        q, k = (it.reshape(len(rows), keys, size).repeat(values // keys, axis=1) for it in (q, k))
        q, k = (it / np.sqrt((it**2).sum(-1, keepdims=True) + 1e-6) for it in (q, k))
        v, z = (it.reshape(len(rows), values, -1) for it in (v, z))
        beta, decay = 1 / (1 + np.exp(-b)), np.exp(-np.exp(raw["A_log"]) * np.log1p(np.exp(a + raw["dt_bias"])))
        state, found = np.zeros((values, size, v.shape[-1])), []
        for at in range(len(rows)):
            state *= decay[at, :, None, None]
            update = (v[at] - np.einsum("hkv,hk->hv", state, k[at])) * beta[at, :, None]
            state = state + k[at, :, :, None] * update[:, None]
            found.append(np.einsum("hkv,hk->hv", state, q[at]) / size**0.5)
        out = unit(np.array(found), self._config["rms_norm_eps"]) * self._of["linear_attn.norm.weight"] * silu(z)
        return out.reshape(len(rows), -1) @ self._of["linear_attn.out_proj.weight"].T


def unit(rows: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))
