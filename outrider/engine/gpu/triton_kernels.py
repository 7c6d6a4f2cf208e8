"""What lies between the products of a pass, as Triton kernels: one launch for each of norms, rotations, gates, choices.

A kernel is compiled once for a model, and once more for some classes of numbers. Arithmetic is float32 as in
`torch_kernels`, the reference; noise and scores are float64 as in `sampling`. The order of all sums is fixed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from outrider.engine.gpu.adapters.low_rank import add_low_rank
from outrider.engine.gpu.attention.page_table import PAGE_ROWS
from outrider.engine.gpu.attention.tree_attention import tree_attention as attend
from outrider.engine.gpu.kernels import LayerForm
from outrider.engine.gpu.sampling import sampling

__all__ = ["add_low_rank", "attend", "choose", "gate", "head", "move", "norm", "rotate"]

WIDE = 2048  # numbers from which on a program has eight warps
UNITS = 1024  # of a program of `gate`
HEADS = 4  # of a program of `rotate`
VOCABULARY = 2048  # logits of a program of `choose`
MOST = 64  # candidates of a row that `choose` finds
NO_TOKEN = tl.constexpr(2**31 - 1)  # behind all tokens
LARGEST_U = tl.constexpr(1.0 - 2.0**-24)
PHI = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _norm_kernel(
    hidden, delta, weight, normed, width, eps, ADDED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(hidden + row * width + at, mask=inside, other=0.0)
    if ADDED:
        x += tl.load(delta + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * width + at, x, mask=inside)
    mean = tl.sum(x * x, 0) / width
    y = x * tl.rsqrt(mean + eps) * tl.load(weight + at, mask=inside, other=0.0)
    high = y.to(normed.dtype.element_ty)
    tl.store(normed + row * width + at, high, mask=inside)
    if SPLIT:
        low = (y - high.to(tl.float32)).to(normed.dtype.element_ty)
        tl.store(normed + (tl.num_programs(0) + row) * width + at, low, mask=inside)


def norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None) -> Tensor:
    """See `Kernels.norm`."""
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    _launch_norm(hidden, delta, weight, normed, eps, split=False)
    return normed


def head(hidden: Tensor, weight: Tensor, eps: float, rows: Tensor) -> Tensor:
    """See `Kernels.head`.

    bfloat16 weights are read once and not converted. Their inputs keep 16 bits, as the sum of two bfloat16 numbers,
    which are twice as many rows of one product.
    """
    if rows.dtype == torch.float32:
        return linear(norm(hidden, weight, eps, torch.float32), rows)
    normed = torch.empty(2 * len(hidden), hidden.shape[1], dtype=rows.dtype, device=hidden.device)
    _launch_norm(hidden, None, weight, normed, eps, split=True)
    return torch.mm(normed, rows.t(), out_dtype=torch.float32)


def _launch_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, normed: Tensor, eps: float, *, split: bool
) -> None:
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        width,
        eps,
        ADDED=delta is not None,
        SPLIT=split,
        BLOCK=block,
        num_warps=8 if block >= WIDE else 4,
    )


@triton.jit
def _rotate_kernel(
    new, queries, cache, cos, sin, positions, places, query_norm, key_norm, eps,
    heads, kv_heads, part_stride, page_stride, head_stride, DIM: tl.constexpr, PAGE: tl.constexpr, NORMED: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    total = heads + 2 * kv_heads
    there = (head < total) & (at < DIM // 2)
    source = new + (row * total + head) * DIM + at
    stored_first = tl.load(source, mask=there, other=0.0)
    stored_second = tl.load(source + DIM // 2, mask=there, other=0.0)
    first = stored_first.to(tl.float32)
    second = stored_second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        is_query = head < heads
        for_query, for_key = there & is_query, there & ~is_query
        first *= scale * (
            tl.load(query_norm + at, mask=for_query, other=0.0) + tl.load(key_norm + at, mask=for_key, other=0.0)
        )
        second *= scale * (
            tl.load(query_norm + DIM // 2 + at, mask=for_query, other=0.0)
            + tl.load(key_norm + DIM // 2 + at, mask=for_key, other=0.0)
        )
    angle = tl.load(positions + row) * (DIM // 2) + at
    c = tl.load(cos + angle, mask=at < DIM // 2, other=0.0)
    s = tl.load(sin + angle, mask=at < DIM // 2, other=0.0)
    kind = queries.dtype.element_ty
    turned_first = (first * c - second * s).to(kind)
    turned_second = (second * c + first * s).to(kind)
    query = queries + (row * heads + head) * DIM + at
    tl.store(query, turned_first, mask=there & (head < heads))
    tl.store(query + DIM // 2, turned_second, mask=there & (head < heads))
    is_value = head >= heads + kv_heads
    kv_head = tl.where(is_value, head - heads - kv_heads, head - heads).to(tl.int64)
    written = tl.load(places + row)
    place = cache + tl.where(is_value, part_stride, 0) + written // PAGE * page_stride + kv_head * head_stride
    place += written % PAGE * DIM + at
    tl.store(place, tl.where(is_value, stored_first, turned_first), mask=there & (head >= heads))
    tl.store(place + DIM // 2, tl.where(is_value, stored_second, turned_second), mask=there & (head >= heads))


def rotate(
    new: Tensor,
    form: LayerForm,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    places: Tensor,
    norms: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See `Kernels.rotate`."""
    queries = torch.empty(len(new), form.heads, form.head_dim, dtype=new.dtype, device=new.device)
    total = form.heads + 2 * form.kv_heads
    _rotate_kernel[(len(new), triton.cdiv(total, HEADS))](
        new, queries, cache, cos, sin, positions, places, *(norms or (None, None)), form.eps,
        form.heads, form.kv_heads, cache.stride(0), cache.stride(1), cache.stride(2),
        DIM=form.head_dim, PAGE=PAGE_ROWS, NORMED=norms is not None, HALF=triton.next_power_of_2(form.head_dim // 2),
        HEADS=HEADS, num_warps=1 if form.head_dim <= 64 else 2,
    )  # fmt: skip
    return queries


@triton.jit
def _gate_kernel(gate_up, units, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < ffn
    gate = tl.load(gate_up + row * 2 * ffn + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn + ffn + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(units + row * ffn + at, (gate / (1.0 + tl.exp(-gate)) * up).to(units.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """See `Kernels.gate`."""
    rows, width = gate_up.shape
    units = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    _gate_kernel[(rows, triton.cdiv(width // 2, UNITS))](gate_up, units, width // 2, BLOCK=UNITS, num_warps=4)
    return units


@triton.jit
def _gumbel(key, token):
    """Return standard Gumbel noise: float64. 1 - u is exact, so the logarithm of it is log1p(-u)."""
    value = key + (token.to(tl.uint64) + 1) * PHI
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = (value ^ (value >> 31)) >> 32
    u = tl.minimum((value.to(tl.float64) + 0.5) * 2.0**-32, LARGEST_U)
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def _choose_kernel(
    parts, logits, keys, temperatures, block_scores, block_tokens, part_stride, row_stride, vocabulary, unpadded,
    count, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(parts + row * row_stride + token, mask=inside, other=0.0)
    if PARTS == 2:
        x += tl.load(parts + part_stride + row * row_stride + token, mask=inside, other=0.0)
    x = tl.where(token < unpadded, x, float("-inf"))
    tl.store(logits + row * vocabulary + token, x, mask=inside)
    if count > 0:
        temperature = tl.load(temperatures + row)
        score = x.to(tl.float64)
        if temperature != 0.0:
            score = score / temperature + _gumbel(tl.load(keys + row).to(tl.uint64, bitcast=True), token)
        place = (row * tl.num_programs(1) + block) * count
        left = inside
        for index in range(count):
            leading = tl.where(left, score, float("-inf"))
            most = tl.max(leading, 0)
            first = tl.min(tl.where(left & (leading == most), token, NO_TOKEN), 0)
            tl.store(block_scores + place + index, most)
            tl.store(block_tokens + place + index, first)
            left = left & (token != first)


@triton.jit
def _merge_kernel(block_scores, block_tokens, choices, found, vocabulary, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    left = at < found
    score = tl.load(block_scores + row * found + at, mask=left, other=float("-inf"))
    token = tl.load(block_tokens + row * found + at, mask=left, other=NO_TOKEN)
    for index in range(count):
        leading = tl.where(left, score, float("-inf"))
        most = tl.max(leading, 0)
        first = tl.min(tl.where(left & (leading == most), token, NO_TOKEN), 0)
        tl.store(choices + row * 2 * count + index, tl.minimum(first, vocabulary - 1).to(tl.float64))
        tl.store(choices + (row * 2 + 1) * count + index, most)
        left = left & (token != first)


def choose(
    parts: Tensor, logits: Tensor, keys: Tensor, temperatures: Tensor, unpadded: int, choices: Tensor | None
) -> None:
    """See `Kernels.choose`."""
    rows, vocabulary = logits.shape
    count = 0 if choices is None else choices.shape[1] // 2
    if count > MOST:  # too many for `_merge_kernel`
        choose(parts, logits, keys, temperatures, unpadded, None)
        steps = sampling.noise_steps(vocabulary, logits.device)
        found, best_scores = sampling.best(sampling.scores(logits, keys, temperatures, steps), count)
        choices.copy_(torch.cat((found.double(), best_scores), 1))  # type: ignore[union-attr]
        return
    blocks = triton.cdiv(vocabulary, VOCABULARY)
    scores = torch.empty(rows, blocks * max(count, 1), dtype=torch.float64, device=logits.device)
    tokens = torch.empty(scores.shape, dtype=torch.int32, device=logits.device)
    _choose_kernel[(rows, blocks)](
        parts, logits, keys, temperatures, scores, tokens, rows * parts.stride(0), parts.stride(0), vocabulary,
        unpadded, count, PARTS=len(parts) // rows, BLOCK=VOCABULARY, num_warps=8,
    )  # fmt: skip
    if choices is not None:
        block = triton.next_power_of_2(blocks * count)
        _merge_kernel[(rows,)](
            scores, tokens, choices, blocks * count, vocabulary, count, BLOCK=block, num_warps=8 if block >= WIDE else 4
        )


@triton.jit
def _move_kernel(
    cache,
    held,
    sources,
    targets,
    layer_stride,
    page_stride,
    head_stride,
    heads,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
):
    move, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source, target = tl.load(sources + move), tl.load(targets + move)
    if source != target:
        at_row = target if WRITE else source
        row = cache + layer * layer_stride + at_row // PAGE * page_stride + at_row % PAGE * DIM
        for first in range(0, heads * DIM, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < heads * DIM
            place = row + (at // DIM) * head_stride + at % DIM
            kept = held + (move * tl.num_programs(1) + layer) * heads * DIM + at
            if WRITE:
                tl.store(place, tl.load(kept, mask=inside), mask=inside)
            else:
                tl.store(kept, tl.load(place, mask=inside), mask=inside)


def move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `Kernels.move`."""
    layers, parts, _, heads, _, dim = cache.shape
    held = torch.empty(len(sources), layers * parts, heads * dim, dtype=cache.dtype, device=cache.device)
    block = min(triton.next_power_of_2(heads * dim), 1024)
    for write in (False, True):
        _move_kernel[(len(sources), layers * parts)](
            cache, held, sources, targets, cache.stride(1), cache.stride(2), cache.stride(3), heads,
            DIM=dim, PAGE=PAGE_ROWS, BLOCK=block, WRITE=write, num_warps=4,
        )  # fmt: skip
