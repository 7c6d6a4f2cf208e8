"""The ways to compute attention agree with one another, and the mask with its definition."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from outrider.engine.device import attention
from tests.engine.device.taped import DEVICE

SLOTS, WIDTH, GROUP, KV_HEADS, DIM, CONTEXT, SPAN = 3, 4, 2, 2, 16, 40, 6


def arguments(seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    prefixes = torch.tensor([0, 17, 34])
    trees = torch.rand(SLOTS, WIDTH, SPAN, generator=random) < 0.4
    trees[1, 2:] = False  # padding
    trees[0, :, 0] = True
    queries = torch.randn(SLOTS, WIDTH * GROUP, KV_HEADS, DIM, generator=random)
    keys, values = torch.randn(2, SLOTS, KV_HEADS, CONTEXT, DIM, generator=random)
    return tuple(it.to(DEVICE) for it in (prefixes, trees, queries, keys, values))


@pytest.mark.parametrize("seed", range(3))
def test_a_query_sees_its_prefix_and_its_path(seed: int) -> None:
    prefixes, trees, *_ = arguments(seed)
    seen = attention.visible(prefixes, trees, CONTEXT, torch.float32, GROUP)
    assert seen.shape == (SLOTS, 1, WIDTH * GROUP, CONTEXT)
    for slot in range(SLOTS):
        for query in range(WIDTH * GROUP):
            path = trees[slot, query // GROUP].cpu().numpy()
            prefix = int(prefixes[slot])
            expected = np.zeros(CONTEXT, np.bool_)
            if path.any():
                expected[:prefix] = True
                expected[prefix : prefix + SPAN] = path
            else:
                expected[0] = True
            assert np.array_equal(seen[slot, 0, query].cpu().numpy() == 0.0, expected)


@pytest.mark.parametrize("way", [attention.products, attention.flexible])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_agree(way: attention.Attend, dtype: torch.dtype) -> None:
    prefixes, trees, *rest = arguments(5)
    queries, keys, values = (it.to(dtype) for it in rest)
    seen = attention.visible(prefixes, trees, CONTEXT, dtype, GROUP)
    exact = attention.fused(queries.double(), keys.double(), values.double(), seen.double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that flex attention is slow unless it is compiled
        found = way(queries, keys, values, seen)
    assert found.dtype == dtype
    assert found.shape == queries.shape
    assert float((found.double() - exact).abs().max()) < (1e-5 if dtype == torch.float32 else 0.03)
