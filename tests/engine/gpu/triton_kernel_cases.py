"""The kernels between the products of a pass, run on random inputs by both implementations; the widest differences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.engine.gpu import torch_kernels
from outrider.engine.gpu.attention.page_table import PAGE_ROWS
from outrider.engine.gpu.kernels import Kernels, LayerForm

EPS = 1e-5


def both() -> tuple[Kernels, Kernels]:
    from outrider.engine.gpu import triton_kernels

    return triton_kernels, torch_kernels


def difference(ours: Tensor, expected: Tensor) -> float:
    """The largest difference, relative above 1; infinite where one is NaN and the other is not."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    equal = (ours == expected) | (ours.isnan() & expected.isnan())
    apart = (ours.double() - expected.double()).abs() / expected.double().abs().clamp_min(1.0)
    apart = apart.nan_to_num(torch.inf, torch.inf)
    return float(torch.where(equal, 0.0, apart).max()) if apart.numel() else 0.0


def random(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def norms(rows: int, width: int, dtype: str, added: bool, device: str) -> float:
    kind = getattr(torch, dtype)
    found = []
    for kernels in both():
        hidden = random(device, rows, width, seed=1) * 3
        delta = random(device, rows, width, seed=2).to(kind) if added else None
        normed = kernels.norm(hidden, random(device, width, seed=3), EPS, kind, delta)
        found.append((hidden, normed))
    return max(difference(ours, expected) for ours, expected in zip(*found, strict=True))


def gates(rows: int, ffn: int, dtype: str, device: str) -> float:
    gate_up = random(device, rows, 2 * ffn).to(getattr(torch, dtype)) * 4
    ours, expected = (kernels.gate(gate_up) for kernels in both())
    return difference(ours, expected)


def rotations(rows: int, heads: int, kv_heads: int, dim: int, dtype: str, normed: bool, device: str) -> float:
    kind, pages = getattr(torch, dtype), 3
    form = LayerForm(heads, kv_heads, dim, EPS)
    new = random(device, rows, (heads + 2 * kv_heads) * dim).to(kind)
    angles = random(device, 50, dim // 2, seed=4)
    positions = torch.arange(rows, device=device) * 3 % 50
    places = torch.randperm(pages * PAGE_ROWS, generator=torch.Generator().manual_seed(1))[:rows].to(device)
    weights = (random(device, dim, seed=5), random(device, dim, seed=6)) if normed else None
    found = []
    for kernels in both():
        cache = torch.full((4, 2, pages, kv_heads, PAGE_ROWS, dim), 9.0, device=device, dtype=kind)
        queries = kernels.rotate(new, form, angles.cos(), angles.sin(), positions, cache[2], places, weights)
        found.append((queries, cache))
    return max(difference(ours, expected) for ours, expected in zip(*found, strict=True))


def heads_of(rows: int, width: int, ids: int, device: str) -> float:
    hidden, weight, head = (
        random(device, rows, width),
        random(device, width, seed=1),
        random(device, ids, width, seed=2),
    )
    ours, expected = (kernels.head(hidden, weight, EPS, head) for kernels in both())
    return difference(ours, expected)


def moves(device: str) -> float:
    sources, targets = ([3, 4, 5, 150, 70, 127, 64], [4, 5, 6, 3, 127, 70, 129])
    places = [torch.tensor([*it, 0, 0], device=device) for it in (sources, targets)]
    found = []
    for kernels in both():
        cache = random(device, 2, 2, 3, 3, PAGE_ROWS, 6)
        kernels.move(cache, *places)
        found.append(cache)
    return difference(*found)


def choices(
    rows: int, vocabulary: int, unpadded: int, candidates: int, parts: int, alike: bool, device: str
) -> tuple[float, float, float, float]:
    """Differences of the logits and of the scores, tokens that differ, and scores that are not in order."""
    given = random(device, parts * rows, vocabulary + 5) * 3
    if alike:
        given = given.round()
    keys = torch.arange(rows, device=device) * 0x12345678ABCDEF1 - 2**61
    temperatures = torch.tensor([0.0, 1.0, 0.3, 2.5] * rows, dtype=torch.float64, device=device)[:rows]
    found: list[tuple[Tensor, Tensor]] = []
    for kernels in both():
        logits = torch.full((rows, vocabulary), torch.nan, device=device)
        chosen = torch.full((rows, 2 * candidates), torch.nan, dtype=torch.float64, device=device)
        kernels.choose(given.clone(), logits, keys, temperatures, unpadded, chosen if candidates else None)
        found.append((logits, chosen))
    (logits, ours), (expected_logits, expected) = found
    tokens, scores = ours[:, :candidates], ours[:, candidates:]
    wrong = tokens != expected[:, :candidates]
    if candidates > 8:  # the reference orders equal scores in any way
        wrong &= scores != expected[:, candidates:]
    unordered = (scores[:, 1:] > scores[:, :-1]).sum() if candidates else 0
    repeated = sum(len(set(row)) < candidates for row in tokens.tolist())
    return (
        difference(logits, expected_logits),
        difference(scores, expected[:, candidates:]),
        float(wrong.sum()),
        float(unordered) + repeated,
    )


def in_place_choice(device: str) -> float:
    """Where the parts are the logits themselves, as in a group of ranks."""
    from outrider.engine.gpu import triton_kernels

    logits = random(device, 3, 5000)
    expected = logits.clone()
    expected[:, 4000:] = -torch.inf
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    triton_kernels.choose(logits, logits, zeros, zeros.double(), 4000, None)
    return difference(logits, expected)


def run(name: str, *arguments: Any) -> Any:
    """Run one of these functions in the process that interprets kernels."""
    with torch.inference_mode():
        return globals()[name](*arguments)
