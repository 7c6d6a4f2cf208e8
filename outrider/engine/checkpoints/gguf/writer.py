"""Writes a checkpoint of the Llama family as a GGUF file, which llama.cpp loads, too."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.block_types import TYPES
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config
from outrider.engine.checkpoints.gguf.config import GGUF_DRAFT_IDS
from outrider.engine.checkpoints.gguf.tensors import gguf_name
from outrider.engine.checkpoints.gguf.tokenizer_metadata import tokenizer_metadata
from outrider.engine.checkpoints.rope import LinearScaling, Llama3Scaling
from outrider.engine.checkpoints.stored_tensors import ALL, ArraySource, as_float32
from outrider.engine.cpu.quantizing import quantized
from outrider.engine.tensor_parallel.sharding import tensor_shapes
from outrider.errors import CheckpointError

ALIGNMENT = 32  # bytes
EMBEDDING = "model.embed_tokens.weight"
AT_A_TIME = 1 << 24  # values that memory holds as float32
TURNED = ("q_proj", "k_proj")  # linears whose outputs are in pairs, see `gguf_tensors`
_TYPES = {bool: 7, str: 8, float: 6, int: 4}  # of values, in the format
_ARRAYS = {"i4": 5, "u4": 4, "f4": 6}

KindOf = Callable[[str, tuple[int, ...]], str]  # returns the type of a tensor by its name in the file and its shape


class _Tensor(NamedTuple):
    name: str  # in the file
    source: str  # in the checkpoint
    shape: tuple[int, ...]
    kind: str

    @property
    def bytes(self) -> int:
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows * TYPES[self.kind].row_bytes(self.shape[-1])


class _Kept(NamedTuple):
    """A model's weights, of the embedding some rows alone."""

    weights: ArraySource
    config: ModelConfig
    ids: list[int]  # of the rows

    def array(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[Any]:
        if name != EMBEDDING:
            return self.weights.array(name, *shape, rows=rows, columns=columns)
        return self.weights.array(name, self.config.vocabulary, self.config.width)[self.ids][rows, columns]


def write_gguf(
    source: Path,
    path: Path,
    kind_of: KindOf,
    *,
    tokenizer: Path | None = None,
    threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write a checkpoint to `path`, as `write_weights` does.

    `tokenizer`: the checkpoint whose tokenizer and chat template it gets; None: its own. Raises CheckpointError, also
    for a checkpoint that is damaged.
    """
    weights = Weights(source, progress)
    write_weights(weights, read_config(source), path, kind_of, source if tokenizer is None else tokenizer, threads)
    weights.finish()


def write_weights(
    weights: ArraySource,
    config: ModelConfig,
    path: Path,
    kind_of: KindOf,
    tokenizer: Path,
    threads: int | None = None,
) -> None:
    """Write a model to `path`, atomically, with the tokenizer and the chat template of a checkpoint.

    `kind_of` gives the types of matrices; vectors are float32. A piece of one tensor at a time is in memory. Raises
    CheckpointError for a model that cannot be said in the format, and for a file that cannot be written.
    """
    if not config.like_llama:
        raise CheckpointError(
            f"{path}: {config.model_type} is not written here; convert it with llama.cpp's convert_hf_to_gguf.py, and "
            "quantize it with its llama-quantize"
        )
    tensors, shapes = [], tensor_shapes(config, range(config.layers))
    if kept := _kept_ids(weights, config):
        weights = _Kept(weights, config, kept)
        shapes[EMBEDDING] = len(kept), config.width
    for name, shape in shapes.items():
        new = gguf_name(name)
        tensors.append(_Tensor(new, name, shape, kind_of(new, shape) if len(shape) > 1 else "f32"))
    entries = shape_metadata(config) | tokenizer_metadata(tokenizer, config)
    divisors = rope_divisors(config)
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file, ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            _write_header(file, entries, tensors, divisors)
            if divisors is not None:
                _pad(file, file.write(divisors.tobytes()))
            for tensor in tensors:
                pieces = _rows(weights, config, tensor)
                _pad(file, sum(file.write(_stored(tensor.kind, rows, pool).tobytes()) for rows in pieces))
        os.replace(draft, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error}); is the disk full?") from None
    finally:
        draft.unlink(missing_ok=True)


def _kept_ids(weights: ArraySource, config: ModelConfig) -> list[int]:
    """Return the ids whose rows of the embedding a file needs: a drafter's own and one of the others, where all others
    have the same row; else none.
    """
    others = np.setdiff1d(np.arange(config.vocabulary), config.draft_ids)
    if not config.draft_ids or not len(others):
        return []
    rows = weights.array(EMBEDDING, config.vocabulary, config.width)[others]
    return [*config.draft_ids, int(others[0])] if (rows == rows[0]).all() else []


def shape_metadata(config: ModelConfig) -> dict[str, Any]:
    """Return the entries that describe a model's sizes."""
    kind = "llama" if config.model_type == "mistral" else config.model_type
    own: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
    }
    if isinstance(config.rope.scaling, LinearScaling):
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.scaling.factor}
    reduced = {GGUF_DRAFT_IDS: np.array(config.draft_ids, np.int32)} if config.draft_ids else {}
    return {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in own.items()} | reduced


def rope_divisors(config: ModelConfig) -> NDArray[np.float32] | None:
    """Return what RoPE's frequencies are divided by, for Llama 3's scaling; None without one."""
    if not isinstance(config.rope.scaling, Llama3Scaling):
        return None
    plain = type(config.rope)(config.rope.theta, None).frequencies(config.head_dim)
    return (plain / config.rope.frequencies(config.head_dim)).astype(np.float32)


def _write_header(
    file: BinaryIO, entries: Mapping[str, Any], tensors: list[_Tensor], divisors: NDArray[np.float32] | None
) -> None:
    written = [(it.name, it.shape, it.kind, it.bytes) for it in tensors]
    if divisors is not None:
        written.insert(0, ("rope_freqs.weight", divisors.shape, "f32", divisors.nbytes))
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(written), len(entries)))
    file.writelines(_text(key) + _value(value) for key, value in entries.items())
    offset = 0
    for name, shape, kind, size in written:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        file.write(_text(name) + dimensions + struct.pack("<IQ", TYPES[kind].number, offset))
        offset += size + -size % ALIGNMENT
    _pad(file, file.tell())


def _pad(file: BinaryIO, written: int) -> None:
    file.write(bytes(-written % ALIGNMENT))


def _text(value: str) -> bytes:
    content = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _ARRAYS[value.dtype.str[1:]], len(value)) + value.tobytes()
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind = struct.pack("<I", _TYPES[type(value)])
    if isinstance(value, str):
        return kind + _text(value)
    return kind + struct.pack({bool: "<?", float: "<f", int: "<I"}[type(value)], value)


def _rows(weights: ArraySource, config: ModelConfig, tensor: _Tensor) -> Iterator[NDArray[np.float32]]:
    """Yield a tensor's rows in float32, some at a time, in the order of the file."""
    turned = config.model_type in ("llama", "mistral") and tensor.source.split(".")[-2] in TURNED
    unit, columns = config.head_dim if turned else 1, tensor.shape[1:] or (1,)
    step = max(1, AT_A_TIME // (columns[0] * unit)) * unit
    for first in range(0, tensor.shape[0], step):
        rows = as_float32(weights.array(tensor.source, *tensor.shape, rows=slice(first, first + step)))
        rows = rows.reshape(-1, *columns)
        if turned:
            pairs = rows.reshape(-1, 2, config.head_dim // 2, *columns)
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        if not np.isfinite(rows).all():
            raise CheckpointError(f"{tensor.source}: has a weight that is no finite number; download it again")
        yield np.ascontiguousarray(rows)


def _stored(kind: str, rows: NDArray[np.float32], pool: ThreadPoolExecutor) -> NDArray[Any]:
    """Return rows in a type of the format."""
    if kind == "f32":
        return rows
    if kind == "f16":
        return rows.astype(np.float16)
    if kind == "bf16":
        bits = rows.view(np.uint32)
        even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return ((bits + even) >> np.uint32(16)).astype(np.uint16)
    return quantized(kind, rows, pool)
