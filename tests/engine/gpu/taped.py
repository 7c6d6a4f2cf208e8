"""Graph capture without a GPU: a recording's operations are taken down, and a replay repeats them and nothing else.

As with a captured graph, a replay runs no Python of the engine: it reads and writes the very tensors that the recording
did. A shape or a number that the host had read, or a buffer that was made anew, would show as a wrong result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.gpu import torch_kernels
from outrider.engine.gpu.attention.tree_attention import AttentionBuffers, AttentionPlan
from outrider.engine.gpu.passes.cuda_graphs import Recorder

DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")  # where these tests run the device's engine
ON_GPU = DEVICE != "cpu"
WARM_UPS = 2
READ_BY_HOST = ("_local_scalar_dense", "nonzero", "item", "equal", "unique", "masked_select", "is_nonzero")


@dataclass
class Operation:
    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: list[Tensor]

    def repeat(self) -> None:
        results = self.function(*self.arguments, **self.named)
        for old, new in zip(self.results, tree_leaves(results), strict=True):
            if old.data_ptr() != new.data_ptr():  # else a view, or done in place
                old.copy_(new)


class Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.tape.append(Operation(func, args, kwargs or {}, [it for it in tree_leaves(results) if it is not None]))
        return results


class Tapes:
    """A recorder as CUDA's: it warms up, captures, and replays what it captured."""

    def __init__(self) -> None:
        self.tapes: list[list[Operation]] = []
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        for _ in range(WARM_UPS):
            work()
        with Writing() as writing:
            work()
        self.tapes.append(writing.tape)

        def replay() -> None:
            self.replays += 1
            for operation in writing.tape:
                operation.repeat()

        return replay

    @property
    def operations(self) -> list[str]:
        """The names of the operations of all tapes."""
        return [str(operation.function) for tape in self.tapes for operation in tape]

    def check_that_the_host_reads_nothing(self) -> None:
        read = [name for name in self.operations if any(reader in name for reader in READ_BY_HOST)]
        assert self.operations
        assert not read, read


class Graphs(Tapes):
    """Counts the recordings of a GPU. Its capture refuses by itself what the host would have to read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = self._recorder.record(work)
        self.tapes.append([])

        def replay() -> None:
            self.replays += 1
            graph()

        return replay

    def check_that_the_host_reads_nothing(self) -> None:
        assert self.tapes


def taped(engine: Any) -> Tapes:
    """Has an engine record as if it were on a GPU, unless it is on one."""
    if not ON_GPU:
        engine.passes.model.kernels = recordable
    engine.runtime.recorder = tapes = Graphs(engine.runtime.recorder) if ON_GPU else Tapes()
    return tapes


def gathered_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    trees: Tensor,
    pages: Tensor,
    *,
    plan: AttentionPlan,
    buffers: AttentionBuffers,
) -> Tensor:
    """What `tree_attention` computes, with operations of torch that a recording can have.

    Each row gets a copy of its text's keys and values.
    """
    row = torch.arange(plan.rows, device=tiles.device)[:, None]
    first, count = tiles[:, 0], tiles[:, 1]
    member = (row >= first) & (row < first + count)  # [rows, capacity]
    used = member.any(1)
    first, _, page, prefix, span, behind = tiles[member.int().argmax(1)].unbind(1)
    key, value = (_texts(held, pages, page, plan.text_pages).float() for held in (keys, values))
    offset = torch.arange(key.shape[2], device=tiles.device) - prefix[:, None]  # [rows, longest text]
    word = trees.gather(1, (offset >> 5).clamp(0, trees.shape[1] - 1))
    bit = (word >> (offset & 31)) & 1 != 0
    causal = offset <= behind[:, None] + row - first[:, None]
    kept = (offset < span[:, None]) & used[:, None]
    seen = kept & ((offset < 0) | torch.where(behind[:, None] >= 0, causal, bit))
    value = value.where(kept[:, None, :, None], 0.0)
    folded = queries.float().reshape(plan.rows, plan.kv_heads, plan.group, plan.dim)
    scores = (folded @ key.transpose(2, 3)) * plan.dim**-0.5
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    attended = (weights.to(plan.dtype).float() @ value).reshape(queries.shape).to(plan.dtype)
    result = buffers.result[: plan.rows]
    return result.copy_(attended.where(used[:, None, None], result))


def _texts(held: Tensor, pages: Tensor, first: Tensor, count: int) -> Tensor:
    """The keys or values of each row's text: [rows, kv_heads, count * PAGE_ROWS, dim].

    `first`: of each row, the first page of its text in `pages`. Behind a text's own pages lie any others.
    """
    entries = (first[:, None] + torch.arange(count, device=pages.device)).clamp_max(len(pages) - 1)
    return held[pages[entries].clamp(0, len(held) - 1)].transpose(1, 2).flatten(2, 3)


recordable: Any = SimpleNamespace(**vars(torch_kernels) | {"attend": gathered_attention})
