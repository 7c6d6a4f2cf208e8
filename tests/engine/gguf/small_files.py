"""GGUF files made byte by byte, also such as no converter writes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.engine.checkpoints.block_types import TYPES

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


WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY, LAYERS, CONTEXT = 64, 4, 2, 96, 70, 2, 256
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def model_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """The metadata of a small model; `changes` by the last parts of keys, None: without it."""
    found = {
        "general.architecture": architecture,
        f"{architecture}.context_length": CONTEXT,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 1e6,
    }
    for name, value in changes.items():
        ending = name.replace("__", ".")
        keys = [key for key in found if key.endswith(ending)] or [f"{architecture}.{ending}"]
        found |= dict.fromkeys(keys, value)
    return {key: value for key, value in found.items() if value is not None}


def model_tensors(architecture: str = "llama", kind: str = "q8_0", *, tied: bool = True) -> dict[str, Made]:
    """The tensors of that model, random ones."""
    size = WIDTH // HEADS
    linears = {
        "attn_q": (HEADS * size, WIDTH),
        "attn_k": (KV_HEADS * size, WIDTH),
        "attn_v": (KV_HEADS * size, WIDTH),
        "attn_output": (WIDTH, HEADS * size),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    random = np.random.default_rng(3)

    def matrix(*shape: int) -> Made:
        blocks = random.integers(0, 256, (shape[0], shape[1] // TYPES[kind].values, TYPES[kind].bytes), np.uint8)
        if kind == "q8_0":
            blocks[..., :2] = np.array([0.002], np.float16).view(np.uint8)
        elif kind in ("f32", "f16"):
            dtype = np.float32 if kind == "f32" else np.float16
            return Made(kind, shape, (0.15 * random.standard_normal(shape)).astype(dtype).tobytes())
        return Made(kind, shape, blocks.tobytes())

    def vector(count: int) -> Made:
        return Made("f32", (count,), (1 + 0.1 * random.standard_normal(count)).astype(np.float32).tobytes())

    found = {"token_embd.weight": matrix(VOCABULARY, WIDTH), "output_norm.weight": vector(WIDTH)}
    if not tied:
        found["output.weight"] = matrix(VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{name}.weight"] = vector(WIDTH)
        for name, shape in linears.items():
            found[f"blk.{layer}.{name}.weight"] = matrix(*shape)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                found[f"blk.{layer}.{name}.bias"] = vector(shape[0])
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{layer}.{name}.weight"] = vector(size)
    return found
