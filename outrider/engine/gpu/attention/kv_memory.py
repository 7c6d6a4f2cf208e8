"""How many pages of KV fit into a device's memory, beside what is there and what is left to others."""

from __future__ import annotations

import torch

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.attention.page_table import PAGE_ROWS, TEXT_SPARE, pages_of
from outrider.engine.interface.engine import SCRATCH, check_kv_memory
from outrider.engine.tensor_parallel.group import TensorGroup
from outrider.errors import ConfigError

WORKSPACE_BYTES = 3 * 2**29  # of a device's memory that recordings, libraries and intermediate results may take


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
