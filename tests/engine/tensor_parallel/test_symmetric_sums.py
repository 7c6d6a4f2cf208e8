"""Ranks add over symmetric memory only where all of them get NCCL's sums by it; else all use NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.tensor_parallel.symmetric_sums import MOST_BYTES, SymmetricSums, find_symmetric_sums

CPU = torch.device("cpu")


class Ranks:
    """Two ranks with the same parts, of which the other one says what is given."""

    def __init__(self, *, others: list[bool] | None = None, names: tuple[str, ...] = ()) -> None:
        self._others = others or [True, True]
        self._names = names

    def agree(self, own: bool) -> bool:
        return self._others.pop(0) and own

    def names(self, own: str) -> list[str]:
        return [own, *self._names]

    def all_reduce(self, part: Tensor) -> Tensor:
        return part * 2


def sums(factor: float = 2.0) -> SymmetricSums:
    def empty(count: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    module: Any = SimpleNamespace(empty=empty, rendezvous=lambda buffer, name: None)
    made = SymmetricSums(module, "ranks", CPU)
    made._sum = lambda own, reduction, name: own * factor
    return made


def missing() -> SymmetricSums:
    raise RuntimeError("not supported by these devices\nat line 3")


def found(make: Callable[[], SymmetricSums], ranks: Ranks) -> SymmetricSums | None:
    return find_symmetric_sums(ranks, make, 0, CPU)


def test_sums_that_all_find_right_are_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = found(sums, Ranks())
    assert made is not None
    part = torch.arange(12.0, dtype=torch.bfloat16).view(3, 4)
    total = made.all_reduce(part)
    assert total.dtype == torch.float32
    assert torch.equal(total, part.float() * 2)
    assert made.fits(part)
    assert not made.fits(torch.zeros(3))
    assert made.fits(torch.zeros(MOST_BYTES // 4))
    assert not made.fits(torch.zeros(MOST_BYTES // 4 + 4))
    assert "sums of up to 512 KiB over symmetric memory" in caplog.text


@pytest.mark.parametrize(
    ("make", "ranks", "reason"),
    [
        (missing, Ranks(), "not there: not supported by these devices"),
        (sums, Ranks(others=[False, True]), "is not there"),
        (lambda: sums(2.001), Ranks(), "differ from NCCL's"),
        (sums, Ranks(others=[True, False]), "differ from NCCL's"),
        (sums, Ranks(names=("elsewhere",)), "on several machines"),
    ],
    ids=["missing", "missing at another rank", "wrong", "wrong at another rank", "several machines"],
)
def test_nccl_is_used_unless_every_rank_has_symmetric_sums(
    make: Callable[[], SymmetricSums], ranks: Ranks, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert found(make, ranks) is None
    assert reason in caplog.text


def test_the_symmetric_memory_module_of_torch_accepts_our_calls() -> None:
    """Of this build, which has no devices for it: an error that is not about the call."""
    symmetric: ModuleType = pytest.importorskip("torch.distributed._symmetric_memory")
    assert torch.ops.symm_mem.one_shot_all_reduce.default._schema.arguments[1].name == "reduce_op"
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        SymmetricSums(symmetric, "none", CPU)
