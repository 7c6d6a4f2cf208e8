"""A recording's operations are all on the device: torch's fake tensors are on "cuda" without one.

A tensor that was left on the host, a copy from or to it, or a number that the host reads would end a capture, or have
it repeat what the host did once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.gpu import DeviceEngine
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm
from outrider.engine.gpu.adapters.adapter_table import AdapterShape
from outrider.engine.gpu.devices import Runtime
from outrider.engine.gpu.eagle.eagle import DeviceEagle
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.passes import staging
from outrider.engine.gpu.passes.cuda_graphs import NoRecorder
from outrider.engine.gpu.weights import load_weights
from outrider.engine.heads.config import Kind
from outrider.engine.interface.features import Features
from outrider.engine.tensor_parallel.group import ALONE
from tests.engine.gpu.taped import recordable
from tests.engine.small_checkpoints import make_checkpoint
from tests.engine.taught import random_heads

CUDA = torch.device("cuda", 0)


def viewed(it: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What a wheel without CUDA does not do for fake tensors by itself: what an index leaves of a tensor, behind which
    indices by tensors are left, for each dimension."""
    found: list[Tensor | None] = []
    for part in index if isinstance(index, tuple) else (index,):
        dimension = len(found)
        if isinstance(part, Tensor):
            found.append(part)
        elif part is None:
            it = it.unsqueeze(dimension)
            found.append(None)
        elif isinstance(part, slice):
            it = torch.ops.aten.slice(it, dimension, part.start, part.stop)
            found.append(None)
        else:
            it = it.select(dimension, part)
    return it, found if any(part is not None for part in found) else []


def get_item(it: Tensor, index: Any) -> Tensor:
    view, indices = viewed(it, index)
    return torch.ops.aten.index(view, indices) if indices else view


def set_item(it: Tensor, index: Any, values: Any) -> None:
    view, indices = viewed(it, index)
    if indices:
        torch.ops.aten.index_put_(view, indices, values)
    else:
        view.copy_(values)


class OnOneDevice(TorchDispatchMode):
    """Refuses operations with a tensor elsewhere; counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        found = {it.device for it in tree_leaves((args, kwargs, results)) if isinstance(it, Tensor)}
        assert found <= {CUDA}, f"{func} on {found}"
        self.operations += 1
        return results


class FakeStaging:
    """The two buffers: the one on the host is real."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._bytes = np.zeros(size, np.uint8)

    array = staging.Staging.array
    tensor = staging.Staging.tensor

    def wait(self) -> None:
        pass

    def copy(self, *stretches: tuple[int, int]) -> None:
        pass


class Refusing(NoRecorder):
    """Runs what is recorded, where nothing but the device may be used."""

    def __init__(self) -> None:
        self.operations = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with OnOneDevice() as only:
            work()
        self.operations += only.operations
        return work


def on_cuda(weights: Any) -> Any:
    return tree_map(lambda it: torch.zeros_like(it, device=CUDA) if isinstance(it, Tensor) else it, weights)


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does on fake tensors what a wheel without CUDA does not, and keeps the host's buffers real."""
    own = ("passes.input_buffers", "passes.row_states", "sampling.restrictions", "sampling.penalties")
    for module in (*own, "adapters.adapter_table", "tree_growth"):
        monkeypatch.setattr(f"outrider.engine.gpu.{module}.Staging", FakeStaging)
    monkeypatch.setattr(FakeTensor, "__getitem__", get_item, raising=False)
    monkeypatch.setattr(FakeTensor, "__setitem__", set_item, raising=False)
    monkeypatch.setattr(FakeTensor, "__invert__", lambda it: it.eq(0), raising=False)
    monkeypatch.setattr(FakeTensor, "copy_", lambda it, by: torch.ops.aten.copy_(it, by), raising=False)


def record(engine: DeviceEngine | DeviceEagle, rows: int, adapters: Sequence[bool], candidates: Sequence[int]) -> None:
    """Have an engine record passes of `rows` rows, with adapters or without, and the growth of trees."""
    passes = engine.passes
    for adapted in adapters:
        passes.layers(rows, adapted=adapted)
    for count in candidates:
        passes.choice.record(rows, count)
    engine.growth.choose(passes.layers(16, adapted=False).plan)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Refusing]:
    def recorded(shape: str, rows: int) -> Refusing:
        folder = make_checkpoint(tmp_path / shape, shape)
        meta = torch.device("meta")
        config, refusing = read_config(folder), Refusing()
        loaded = load_weights(Weights(folder), config, ALONE.shard, range(config.layers), meta, "bfloat16")
        patch(monkeypatch)
        with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
            engine = DeviceEngine(
                config,
                tree_map(
                    lambda it: torch.zeros_like(it, device=CUDA) if isinstance(it, Tensor) else it,
                    loaded,
                ),
                b"",
                Runtime(CUDA, recordable, refusing),
                slots=3,
                rows=200,
                pages=9,
                adapters=AdapterShape(config, ALONE.shard, range(3), AdapterForm.of(config, torch.bfloat16, CUDA), 4),
                features=Features((1, 2), all_rows=True),
            )
            record(engine, rows, (False, True), (0, 2, 64))
        return refusing

    return recorded


@pytest.mark.skipif(torch.cuda.is_available(), reason="a capture shows it")
@pytest.mark.parametrize(("shape", "rows"), [("grouped", 4), ("biased", 1), ("qwen3", 48)])
def test_a_recording_has_no_tensor_on_the_host(recorder: Callable[[str, int], Refusing], shape: str, rows: int) -> None:
    assert recorder(shape, rows).operations > 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="a capture shows it")
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_a_recording_of_heads_has_no_tensor_on_the_host(
    kind: Kind, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, refusing = make_checkpoint(tmp_path / "target"), Refusing()
    random_heads(kind, target, tmp_path / "heads")
    config, place = read_config(target), torch.device("cpu")
    model = EagleModel.read(tmp_path / "heads", config, Weights(target), torch.bfloat16, place)
    patch(monkeypatch)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        model = replace(model, weights=on_cuda(model.weights))
        runtime = Runtime(CUDA, recordable, refusing)
        engine = DeviceEagle(model, b"", runtime, slots=3, rows=200, pages=12, window=window)
        record(engine, 16, (False,), (64,))
    assert refusing.operations > 150


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.zeros(2, device=CUDA) + torch.zeros(2),
        lambda: torch.zeros(2, device=CUDA).cpu(),
        lambda: torch.arange(3),
        lambda: torch.zeros(2, device=CUDA).sum().item(),
    ],
    ids=["mixed", "copied", "made on the host", "read by the host"],
)
def test_work_that_a_capture_forbids_is_refused(work: Callable[[], object]) -> None:
    with FakeTensorMode(), pytest.raises((AssertionError, RuntimeError)):
        Refusing().record(work)  # type: ignore[arg-type]
