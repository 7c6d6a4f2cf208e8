"""GGUF files made byte by byte, also such as no converter writes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.engine.checkpoints.gguf.block_types import TYPES

ALIGNMENT = 32


class Typed(NamedTuple):
    """A value of the metadata, packed."""

    kind: int
    content: bytes


class Made(NamedTuple):
    """A tensor of a file. What is None is made as the format has it."""

    kind: str
    shape: tuple[int, ...]
    content: bytes | None = None
    offset: int | None = None
    number: int | None = None


def text(value: str | bytes) -> bytes:
    """A text of the format."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def packed(value: Any) -> Typed:
    """A value as converters write it."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(7, bytes([value]))
    if isinstance(value, int):
        return Typed(4, struct.pack("<I", value))
    if isinstance(value, float):
        return Typed(6, struct.pack("<f", value))
    if isinstance(value, str):
        return Typed(8, text(value))
    entries = [packed(entry) for entry in value]
    kind = entries[0].kind if entries else 4
    return Typed(9, struct.pack("<IQ", kind, len(entries)) + b"".join(entry.content for entry in entries))


def size(tensor: Made) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape[:-1]) * TYPES[tensor.kind].row_bytes(tensor.shape[-1])


def gguf(
    metadata: Mapping[str, Any] | Sequence[tuple[str | bytes, Any]] = (),
    tensors: Mapping[str, Made] | Sequence[tuple[str, Made]] = (),
    *,
    version: int = 3,
    keys: int | None = None,
    count: int | None = None,
) -> bytes:
    """The content of a file. `keys`, `count`: the numbers of entries and tensors that it claims."""
    entries = [*metadata.items()] if isinstance(metadata, Mapping) else [*metadata]
    listed = [*tensors.items()] if isinstance(tensors, Mapping) else [*tensors]
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(listed) if count is None else count, len(entries) if keys is None else keys
    )
    for key, value in entries:
        typed = packed(value)
        head += text(key) + struct.pack("<I", typed.kind) + typed.content
    data = b""
    for name, it in listed:
        offset = len(data) if it.offset is None else it.offset
        head += text(name) + struct.pack("<I", len(it.shape)) + struct.pack(f"<{len(it.shape)}Q", *it.shape[::-1])
        head += struct.pack("<IQ", TYPES[it.kind].number if it.number is None else it.number, offset)
        content = bytes(size(it)) if it.content is None else it.content
        data += content + bytes(-len(content) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + data


def write(path: Path, *args: Any, **options: Any) -> Path:
    """Write a file; see `gguf`."""
    path.write_bytes(gguf(*args, **options))
    return path


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes as rows of a type."""
    return np.random.default_rng(seed).integers(0, 256, (rows, TYPES[kind].row_bytes(columns)), dtype=np.uint8)
