"""The Triton kernels compute what the reference on torch does: under the interpreter, or on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from outrider.engine.gpu import devices
from outrider.engine.gpu.devices import kernels_for
from outrider.errors import ConfigError
from tests.engine.gpu import triton_kernel_cases as cases
from tests.engine.gpu.interpreter import runner

Run = Callable[..., Any]
CLOSE = {"float32": 1e-5, "bfloat16": 2**-7}  # for bfloat16 its last bit


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    yield from runner(cases.run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (5, 4096)])
@pytest.mark.parametrize("added", [True, False])
def test_the_norm_kernel_equals_torch(run: Run, rows: int, width: int, dtype: str, added: bool) -> None:
    assert run("norms", rows, width, dtype, added) <= CLOSE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "ffn"), [(1, 99), (4, 1024), (3, 2500)])
def test_the_gate_kernel_equals_torch(run: Run, rows: int, ffn: int, dtype: str) -> None:
    assert run("gates", rows, ffn, dtype) <= CLOSE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"), [(1, 4, 2, 16), (6, 8, 4, 64), (5, 3, 1, 6), (3, 14, 2, 80)]
)
def test_the_rotation_kernel_equals_torch_and_writes_kv(
    run: Run, rows: int, heads: int, kv_heads: int, dim: int, dtype: str, normed: bool
) -> None:
    assert run("rotations", rows, heads, kv_heads, dim, dtype, normed) <= CLOSE[dtype]


def test_the_head_kernel_equals_torch(run: Run) -> None:
    assert run("heads_of", 3, 100, 70) < 1e-4


def test_the_move_kernel_handles_overlapping_rows(run: Run) -> None:
    assert run("moves") == 0.0


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "unpadded", "candidates", "parts"),
    [
        (1, 50, 50, 2, 1),
        (8, 4096, 4096, 2, 1),
        (4, 5000, 4100, 8, 2),
        (4, 3000, 2900, 64, 1),
        (3, 90, 60, 70, 1),
        (2, 99, 9, 0, 2),
    ],
)
def test_the_choice_kernel_equals_the_reference(
    run: Run, rows: int, vocabulary: int, unpadded: int, candidates: int, parts: int, alike: bool
) -> None:
    logits, scores, tokens, order = run("choices", rows, vocabulary, unpadded, candidates, parts, alike)
    assert logits == 0.0
    assert scores < 1e-9
    assert tokens == 0
    assert order == 0


def test_the_choice_kernel_works_in_place(run: Run) -> None:
    assert run("in_place_choice") == 0.0


def test_a_missing_compiler_of_cuda_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs Triton"):
        kernels_for(cuda)
    monkeypatch.undo()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="no cc or gcc or clang; install gcc"):
        kernels_for(cuda)
    monkeypatch.setenv("CC", "icx")
    with pytest.raises(ConfigError, match="there is no icx"):
        kernels_for(cuda)
