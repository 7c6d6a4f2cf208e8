"""Models of `transformers` compute by their own modules over our cache, in trees and batches, what they do alone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cli.verification.reference import Reference as VerificationReference
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.transformers.engine import TransformersEngine, batches
from outrider.engine.transformers.pretrained import NO_HUB_KERNELS, SAFE_LOADING
from outrider.engine.transformers.tree_attention import AttentionBatch
from outrider.errors import ConfigError
from tests.engine.contract import *  # noqa: F403 what every engine that is not bit for bit the same does
from tests.engine.contract import assert_alike
from tests.engine.families import CONTEXT, TREES, make_family
from tests.engine.ranked import ranked
from tests.engine.small_checkpoints import MODELS, Reference, Tree, assert_same, make_checkpoint, prompt, random_tokens

SLOTS = 6
ROOT = Path(__file__).parents[3]
MAKING = re.compile(r"AutoModel\w*\.(\w+)$")


@pytest.fixture(scope="module", params=TREES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Reference]:
    folder = make_family(tmp_path_factory.mktemp(request.param), request.param)
    return load(folder), Reference.load(folder, attention=None)


def load(folder: Path, dtype: str = "float32") -> TransformersEngine:
    engine = load_engine(folder, backend="transformers", dtype=dtype, slots=SLOTS, threads=1)  # type: ignore[arg-type]
    assert isinstance(engine, TransformersEngine), engine.treeless
    assert not engine.treeless
    return engine


def test_kernels_that_a_checkpoint_names_are_not_taken(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gpt2")
    tokens = np.arange(1, 20)
    before = load(folder).forward([prompt(0, tokens)])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"attn_implementation": "somebody/attention", "experts_implementation": "somebody/experts"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert np.array_equal(load(folder).forward([prompt(0, tokens)]), before)
    assert np.isfinite(VerificationReference(folder).logits([1, 2], [3])).all()  # what `outrider verify` compares with


def test_every_transformers_model_is_made_without_hub_kernels() -> None:
    found = []
    for package in ("outrider", "drafter_svc", "verifier_svc", "router", "bench"):
        for file in (ROOT / package).rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and (made := MAKING.match(ast.unparse(call.func))):
                    spread = {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}
                    found.append((made[1], spread))
    assert len(found) == 4
    for method, spread in found:
        assert spread >= {{"from_pretrained": "SAFE_LOADING", "from_config": "NO_HUB_KERNELS"}[method]}
    assert SAFE_LOADING.items() >= NO_HUB_KERNELS.items()


def test_a_model_that_was_loaded_outlives_its_files(tmp_path: Path) -> None:
    """In a process of its own, which a mapped page beyond the end of its file would end with SIGBUS."""
    folder = make_family(tmp_path, "gpt2")
    script = f"""
import os
from pathlib import Path
from outrider.engine.transformers.pretrained import Pretrained
from outrider.engine.tensor_parallel.sharding import Shard
loaded = Pretrained.load(Path({str(folder)!r}), "float32", Shard())
before = loaded.logits([1, 2, 3])
for file in Path({str(folder)!r}).glob("*.safetensors"):
    os.truncate(file, 0)
print(bool((loaded.logits([1, 2, 3]) == before).all()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_drafts_beyond_the_context_do_not_fail(pair: tuple[Engine, Reference]) -> None:
    engine, _ = pair
    found = engine.forward([Segment(0, 0, np.array([3, 4]), np.array([CONTEXT - 1, CONTEXT]))])
    assert np.isfinite(found).all()


def test_the_transformers_engine_equals_the_native_engine(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "grouped")
    ours, native = load(folder), CpuEngine.load(folder, EngineSettings(dtype="float32", slots=SLOTS, threads=1))
    random = np.random.default_rng(5)
    history, tree = random_tokens(native, random, 40), Tree.random(native, random, 14)
    for engine in (ours, native):
        engine.forward([prompt(1, history, wanted=0)])
    assert_same(ours.forward([tree.segment(1, 40)]), native.forward([tree.segment(1, 40)]))
    shared = ("vocabulary", "context", "positions", "rows", "slots", "parameters", "dtype", "eos_ids", "kv_bytes")
    assert [getattr(ours, name) for name in shared] == [getattr(native, name) for name in shared]


# How far logits are off, as a share of their deviation: mean + 4 deviations of four texts. It is what rounding makes of
# it: int8 rounds a row's weights to 1/127 of the largest, int4 a group's to 2/15, some fifteen times as much.
@pytest.mark.parametrize(
    ("name", "dtype", "off"),
    [
        ("llama", "bfloat16", 0.026),
        ("llama", "int8", 0.051),
        ("llama", "int4", 0.55),
        ("gpt2", "bfloat16", 0.013),
        ("gpt2", "int8", 0.027),
        ("gpt2", "int4", 0.25),
    ],
)
def test_lower_precision_reads_less_and_stays_close(name: str, dtype: str, off: float, tmp_path: Path) -> None:
    folder = make_family(tmp_path, name)
    exact, engine = load(folder), load(folder, dtype)
    tokens = random_tokens(exact, np.random.default_rng(6), 50)
    expected = exact.forward([prompt(0, tokens)])
    found = engine.forward([prompt(0, tokens)])
    assert off / 3 < np.sqrt(((found - expected) ** 2).mean()) / expected.std() < off
    assert engine.dtype == dtype
    assert engine.kv_bytes == exact.kv_bytes // 2
    assert engine.parameters == exact.parameters
    order = [load(folder, other).weight_bytes for other in ("int4", "int8", "bfloat16", "float32")]
    assert order == sorted(set(order))


def test_a_type_without_a_torchao_kernel_is_refused_with_an_alternative(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gpt2", n_embd=24, n_head=4)
    with pytest.raises(ConfigError, match=r"dtype: .*int4; use bfloat16"):
        load(folder, "int4")


def test_ranks_share_a_model_by_its_own_plan(tmp_path: Path) -> None:
    folders = [make_family(tmp_path / name, name) for name in ("llama", "qwen2-moe")]
    random = np.random.default_rng(7)
    with ranked(2, *folders, by="torch", backend="transformers", slots=SLOTS) as group:
        for folder in folders:
            one = load(folder)
            history, tree = random_tokens(one, random, 21), Tree.random(one, random, 9)
            with group.lead(folder) as whole:
                assert whole.weight_bytes < one.weight_bytes
                assert whole.kv_bytes == one.kv_bytes // 2
                for engine in (one, whole):
                    engine.forward([prompt(0, history, wanted=0), prompt(3, history[:5], wanted=0)])
                    engine.copy(0, 1, 21)
                segments = [tree.segment(1, 21), prompt(3, history[5:9], 5)]
                assert_alike(whole.forward(segments), one.forward(segments).astype(np.float64))


def test_a_model_without_a_plan_is_not_shared(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "opt")
    with ranked(1, folder, by="torch") as group:
        group.group.shard = Shard(0, 2)  # the plan is asked before anything is shared
        with pytest.raises(ConfigError, match="tensor_parallel: transformers cannot share this model among 2 ranks"):
            load_engine(folder, dtype="float32", slots=1, threads=1, group=group.group)


def test_segments_of_one_batch_have_similar_sizes() -> None:
    def segment(slot: int, count: int, prefix: int) -> Segment:
        return prompt(slot, np.zeros(count, np.int64), prefix)

    together = batches([segment(3, 1, 500), segment(0, 9, 20), segment(1, 16, 900)])
    assert [[part.slot for part in batch] for batch in together] == [[0, 1, 3]]
    apart = batches([segment(0, 1, 500), segment(1, 128, 0), segment(2, 70, 0), segment(3, 2, 30_000)])
    assert sorted([part.slot for part in batch] for batch in apart) == [[0], [1, 2], [3]]


def test_the_reference_target_runs_through_both(tmp_path: Path) -> None:
    engine = load(MODELS / "target")
    tokens = random_tokens(engine, np.random.default_rng(8), 100)
    assert_same(engine.forward([prompt(0, tokens)]), Reference.load(MODELS / "target").logits(tokens))
    assert torch.get_num_threads() == 1


def test_a_window_longer_than_the_probe_is_probed_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family(tmp_path, "mistral-window", sliding_window=64)
    assert not load_engine(folder, backend="transformers", dtype="float32", slots=1, threads=1).treeless
    mask = AttentionBatch.mask
    monkeypatch.setattr(AttentionBatch, "mask", lambda batch, dtype, narrower=None: mask(batch, dtype))
    assert load_engine(folder, backend="transformers", dtype="float32", slots=1, threads=1).treeless
