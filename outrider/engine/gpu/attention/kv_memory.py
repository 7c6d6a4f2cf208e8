"""The KV of all slots in a device's memory, and how many of its pages fit there."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.attention.page_table import PAGE_ROWS, TEXT_SPARE, PageTable, pages_of
from outrider.engine.gpu.devices import Runtime
from outrider.engine.interface.engine import SCRATCH, check_kv_memory
from outrider.engine.tensor_parallel.group import TensorGroup
from outrider.engine.torch_layers.kv_cache import lazy_zeros
from outrider.errors import ConfigError

MOST_MOVES = 256  # of rows together, because a kernel holds all rows that it moves
WORKSPACE_BYTES = 3 * 2**29  # of a device's memory that recordings, libraries and intermediate results may take


class PagedKv:
    """Pages of KV, and the table of whose they are."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, runtime: Runtime, *, slots: int, rows: int, pages: int
    ) -> None:
        """`config`: the shape of this rank's part; `pages`: of all slots together."""
        self.slots, self.rows = slots, rows
        device = runtime.device
        shape = (config.layers, 2, pages + 1, config.kv_heads, PAGE_ROWS, config.head_dim)  # one page for padding
        self.cache = (
            lazy_zeros(*shape, dtype=dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.table = PageTable(slots, rows, pages)
        self.bounded = pages < slots * pages_of(rows)  # whether slots wait for pages of one another
        self.row_bytes = self.cache.nbytes // ((pages + 1) * PAGE_ROWS)
        self._runtime = runtime

    @property
    def bytes_taken(self) -> int:
        """Bytes of all pages in use; a page that several slots share counts once."""
        return (self.table.pages - self.table.free) * PAGE_ROWS * self.row_bytes

    def move(self, moves: NDArray[np.int64]) -> None:
        """Move cache rows outside of a pass. The host does not wait for it. `moves`: [2, moves] sources, targets.

        Rows go to places that no move reads first, some at a time.
        """
        sources, targets = moves
        free = ~np.isin(targets, sources)
        copies, rest = moves[:, free], moves[:, ~free]
        parts = [copies[:, at : at + MOST_MOVES] for at in range(0, copies.shape[1], MOST_MOVES)]
        for part in (*parts, rest) if rest.size else parts:
            self._runtime.kernels.move(self.cache, *self._runtime.sent(np.ascontiguousarray(part)))


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a page of a model's KV, or of a rank's part of it."""
    return 2 * config.layers * config.kv_heads * PAGE_ROWS * config.head_dim * dtype.itemsize


def pages_for(
    device: torch.device,
    page: int,
    slots: int,
    rows: int,
    kv_memory: int | None,
    group: TensorGroup,
    reserved: int,
) -> int:
    """Return how many pages of KV there are: those of all slots, or as many as fit; all ranks have equally many.

    `page`: bytes of one; `kv_memory`: bytes, None: no bound; `reserved`: bytes of a GPU that are left to adapters and
    heads. Raises ConfigError if one text does not fit.
    """
    whole = slots * pages_of(rows)
    least = min(whole, pages_of(rows + SCRATCH) + TEXT_SPARE)
    pages = whole
    if kv_memory is not None:
        check_kv_memory(kv_memory, least * page, rows)
        pages = min(whole, kv_memory // page)
    if device.type == "cuda":
        room = max(0, torch.cuda.mem_get_info(device)[0] - WORKSPACE_BYTES - reserved) // page - 1
        if room < least:
            fewer = "lower max_adapters or slots, " if reserved else ""
            raise ConfigError(
                f"context: the KV of one text of {rows - SCRATCH} tokens takes {least * page / 2**30:.1f} GiB, and "
                f"{max(0, room * page) / 2**30:.1f} GiB of {device} are free for it; {fewer}lower the context, "
                "use float8 or int4, or a larger device"
            )
        pages = min(pages, room)
    if group.shard.of > 1:
        group.barrier()  # others may still load
        pages = int(group.all_gather(torch.tensor([pages])).min())
    return pages
