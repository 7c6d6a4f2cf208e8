"""Padding: makes a checkpoint that costs as much as a larger one and has the outputs of its small source.

For benchmarks and demonstrations. All new weights are inert. The new channels of the residual stream stay zero because
all rows that write to them are zero; new heads and new feed-forward units write through zero columns; new layers write
through zero projections. New weights that cannot change the outputs are random. The RMS norms divide by the mean over
more channels, so their weights shrink by sqrt(old / new) and eps by old / new. Both are exact when the ratio is a power
of 4; else the norms are stored in float32, and exact to its rounding.

A source can be padded to the shape of a known model: its width, layers, feed-forward, vocabulary, and projections of
its sizes, which have more heads of the source's size. A step reads the same bytes and multiplies as much as with that
model. Ids beyond the source's vocabulary have rows in the embedding and in the head, but Outrider's engines never
choose them: a key in config.json names the first of these ids, whose logits become -inf. `transformers` does not know
the key, so there such ids may be chosen.

Acceptance is that of the source: a drafter drafts as well for the padded model. Skipping inert layers costs no
acceptance, so never measure self-speculation on a padded checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.checkpoint import (
    INDEX,
    SINGLE,
    UNPADDED,
    ModelConfig,
    Weights,
    config_json,
    copy_tokenizer,
    read_config,
)
from outrider.engine.checkpoints.model_card import SAME, weights_digest
from outrider.engine.checkpoints.quantized.method import KEY
from outrider.engine.checkpoints.stored_tensors import ALL, STORED, as_float32, as_tensor
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SEED = 20240229  # of the inert weights
STD = 0.02  # of the inert weights
PERIOD = 1_000_003  # inert weights after which they repeat; a prime, so that no two rows are equal
FFN_TILES = 256, 64  # feed-forward sizes stay multiples of one of these: the first is the longest block of GGUF's types
# Proportions of models of this family, by their width.
FFN_PER_WIDTH = 2.75
WIDTH_PER_LAYER = 85
MOST_LAYERS = 128
FILE_BYTES = 2**31  # of one file


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """The sizes of a model that padding changes. The size of a head stays."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: ModelConfig) -> PaddedShape:
        """Return the sizes of a model."""
        sizes = config.width, config.layers, config.heads, config.kv_heads, config.ffn, config.vocabulary
        return cls(*sizes, config.tied)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class KnownShape:
    """The shape of a known model, without the size of a head."""

    width: int
    layers: int
    queries: int  # heads times their size
    keys: int
    ffn: int
    vocabulary: int
    tied: bool


KNOWN = {
    "llama-3.1-8b": KnownShape(4096, 32, 4096, 1024, 14336, 128256, False),
    "llama-3.2-1b": KnownShape(2048, 16, 2048, 512, 8192, 128256, True),
    "tiny": KnownShape(512, 8, 1024, 256, 768, 6000, False),  # of no real model; for trials
}


def known_shape(name: str, config: ModelConfig) -> PaddedShape:
    """Return the known shape of that name for a model. Raises CheckpointError where the model does not fit into it."""
    if name not in KNOWN:
        raise CheckpointError(f"shape: is '{name}', must be one of {', '.join(KNOWN)}")
    known, old = KNOWN[name], PaddedShape.of(config)
    heads, kv_heads = known.queries // config.head_dim, known.keys // config.head_dim
    shape = PaddedShape(known.width, known.layers, heads, kv_heads, known.ffn, known.vocabulary, known.tied)
    for what in ("width", "layers", "kv_heads", "group", "ffn", "vocabulary"):
        if getattr(shape, what) < getattr(old, what):
            raise CheckpointError(f"the model does not fit into {name}: its {what} is {getattr(old, what)}")
    if shape.tied and not old.tied:
        raise CheckpointError(f"the model does not fit into {name}, whose head is its embedding")
    if known.queries % config.head_dim or known.keys % config.head_dim or heads % kv_heads:
        raise CheckpointError(f"{name} cannot be made of heads of {config.head_dim}")
    return shape


def pad_checkpoint(
    source: Path,
    destination: Path,
    *,
    parameters: int | None = None,
    shape: str | None = None,
    vocabulary: int | None = None,
) -> int:
    """Write a padded checkpoint with the outputs of `source`, and return its number of parameters.

    It has about `parameters` parameters, or the `shape` of that name in `KNOWN`, or only a larger `vocabulary`, which a
    drafter needs for a target of such a shape. `destination` must not exist, or be empty; it appears complete or not at
    all. Tensors keep their stored type. Raises CheckpointError when `source` is damaged or does not fit, or
    `destination` is in use or cannot be written.
    """
    config = read_config(source).within_windows()
    if not config.like_llama:
        raise CheckpointError(f"{source}: {config.model_type} cannot be padded; take a model of the Llama family")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination}: exists already; choose a folder that does not")
    new = padded_shape(source, config, parameters, shape, vocabulary)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        padded = PaddedWeights(Weights(source), config, new)
        try:
            _write(padded, made)
        except OSError as error:
            raise CheckpointError(f"{destination}: cannot be written ({error}); is the disk full?") from None
        raw = config_json(source)
        for other in ("layer_types", "max_window_layers", KEY):  # of each layer; the values are written dequantized
            raw.pop(other, None)
        raw.update(
            hidden_size=new.width,
            num_hidden_layers=new.layers,
            num_attention_heads=new.heads,
            num_key_value_heads=new.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=new.ffn,
            rms_norm_eps=padded.config.eps,
            vocab_size=new.vocabulary,
            tie_word_embeddings=new.tied,
        )
        raw[SAME] = weights_digest(source)
        if padded.config.unpadded_vocabulary < new.vocabulary:
            raw[UNPADDED] = padded.config.unpadded_vocabulary
        (made / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        copy_tokenizer(source, made)
        os.replace(made, destination)
    return count_parameters(config, new)


def padded_shape(
    source: Path, config: ModelConfig, parameters: int | None, shape: str | None = None, vocabulary: int | None = None
) -> PaddedShape:
    """Return the shape that `pad_checkpoint` gives a model. Raises CheckpointError where the model does not fit."""
    if config.draft_ids:
        raise CheckpointError(f"{source}: is a drafter whose head has a part of the ids; pad the target")
    if shape is not None:
        return known_shape(shape, config)
    if vocabulary is not None:
        if vocabulary <= config.vocabulary:
            raise CheckpointError(f"{source}: has a vocabulary of {config.vocabulary}; ask for more than {vocabulary}")
        return replace(PaddedShape.of(config), vocabulary=vocabulary)
    assert parameters is not None
    if (new := choose_shape(config, parameters)) is None:
        present = count_parameters(config, PaddedShape.of(config))
        raise CheckpointError(f"{source}: has {present} parameters already; ask for more than {parameters}")
    return new


def _write(padded: PaddedWeights, folder: Path) -> None:
    """Write the tensors into one file, or into several with an index."""
    files: list[list[str]] = [[]]
    size = 0
    for name in padded.shapes:
        more = padded.bytes_of(name)
        if files[-1] and size + more > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += more
    listed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_file(padded, names, folder / file)
        listed |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(map(padded.bytes_of, listed))}, "weight_map": listed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(padded: PaddedWeights, names: Sequence[str], path: Path) -> None:
    """Write one file in safetensors format, with one tensor at a time in memory.

    The safetensors library does not support bfloat16 for numpy, so this function writes the format itself.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + padded.bytes_of(name)
        kind = _STORED[padded.dtypes[name]]
        header[name] = {"dtype": kind, "shape": padded.shapes[name], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            padded.array(name, *padded.shapes[name]).tofile(file)


def count_parameters(config: ModelConfig, shape: PaddedShape) -> int:
    """Return the number of parameters that the model has in that shape."""
    return sum(math.prod(tensor.size) for tensor in _tensors(config, shape))


def choose_shape(config: ModelConfig, parameters: int) -> PaddedShape | None:
    """Return the shape with about that many parameters that is closest to the family's proportions.

    None: all shapes that hold the model have more parameters.
    """
    old = PaddedShape.of(config)
    best: tuple[float, PaddedShape] | None = None
    for power in range(5):
        width = config.width * 4**power
        # Doubled until the heads together are about as wide as the stream; transformers wants a divisor of the width.
        doublings = max(0, round(math.log2(width / (config.head_dim * config.heads))))
        kv_heads = config.kv_heads * 2**doublings
        wider = replace(old, width=width, heads=kv_heads * config.group, kv_heads=kv_heads)
        bare, one = (count_parameters(config, replace(wider, layers=layers)) for layers in (0, 1))
        unit = next((it for it in FFN_TILES if config.ffn % it == 0), FFN_TILES[-1])
        tile = (3 * width + (2 if config.ffn_bias else 0)) * unit
        for layers in range(config.layers, MOST_LAYERS + 1):
            tiles = round((parameters - bare - layers * (one - bare)) / (layers * tile))
            shape = replace(wider, layers=layers, ffn=config.ffn + tiles * unit)
            if tiles < 0 or shape == old:
                continue
            strain = abs(math.log(shape.ffn / (FFN_PER_WIDTH * width)))
            strain += abs(math.log(layers * WIDTH_PER_LAYER / width))
            if best is None or strain < best[0]:
                best = strain, shape
    return None if best is None else best[1]


class _Padding(NamedTuple):
    """How a tensor of a checkpoint is padded."""

    # Content of the new part. "ids": zero in rows of ids that the source has, random in others.
    fill: Literal["zero", "random", "one", "ids"]
    # Place of the source's part: "first": at the beginning; "norm": there, scaled as the width grows; "heads" and
    # "columns": by heads, each with its KV head, along the first or the second dimension.
    place: Literal["first", "norm", "heads", "columns"] = "first"


_PADDINGS = {  # by what a tensor is, see `Shard`; a bias is padded as its linear, but for those behind the projections
    "embedding": _Padding("ids"),
    "norm": _Padding("one", "norm"),
    "attention_norm": _Padding("one", "norm"),
    "ffn_norm": _Padding("one", "norm"),
    "query_norm": _Padding("one"),
    "key_norm": _Padding("one"),
    "query": _Padding("random", "heads"),
    "output": _Padding("zero", "columns"),
    "output_bias": _Padding("zero"),
    "down": _Padding("zero"),
}


class _Tensor(NamedTuple):
    """A tensor of a padded checkpoint."""

    name: str
    size: tuple[int, ...]
    padding: _Padding


def _shaped_config(config: ModelConfig, shape: PaddedShape) -> ModelConfig:
    """Return the configuration of a model in that shape."""
    return replace(
        config,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        vocabulary=shape.vocabulary,
        tied=shape.tied,
        eps=config.eps * config.width / shape.width,
    )


def _tensors(config: ModelConfig, shape: PaddedShape) -> Iterator[_Tensor]:
    """Yield all tensors of a checkpoint of that shape."""
    padded, whole = _shaped_config(config, shape), Shard()
    ends = whole.ends(padded)
    if padded.tied:
        del ends["head"]
    for parts in (ends, *(whole.layer(padded, index) for index in range(padded.layers))):
        for what, part in parts.items():
            padding = _PADDINGS.get(what) or _PADDINGS.get(what.removesuffix("_bias"), _Padding("random"))
            yield _Tensor(part.name, part.shape, padding)


class PaddedWeights:
    """The tensors of a padded checkpoint, each made when it is read."""

    def __init__(self, source: Weights, config: ModelConfig, shape: PaddedShape) -> None:
        """`config`: that of the source."""
        self.config = _shaped_config(config, shape)
        self._source = source
        self._old, self._new = config, shape
        self._tensors = {tensor.name: tensor for tensor in _tensors(config, shape)}
        self._stored = {tensor.name: tensor.size for tensor in _tensors(config, PaddedShape.of(config))}
        self.shapes = {name: tensor.size for name, tensor in self._tensors.items()}
        new = source.array("model.embed_tokens.weight", config.vocabulary, config.width).dtype
        parts = {name: self._part(tensor) for name, tensor in self._tensors.items()}
        self.dtypes = {name: new if part is None else part.dtype for name, part in parts.items()}

    def bytes_of(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor, or a part of it, as `Weights.take` does."""
        return as_tensor(self.array(name, *shape, rows=rows, columns=columns))

    def array(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[Any]:
        """Return a tensor, or a part of it, as `Weights.array` does."""
        tensor = self._tensors[name]
        assert shape == tensor.size, name
        part, made = self._part(tensor), self._filled(tensor)
        if part is not None:
            corner = self._shaped(tensor, part, PaddedShape.of(self._old))
            padded = self._shaped(tensor, made, self._new)
            padded[tuple(slice(0, length) for length in corner.shape)] = corner
        return made[(rows, columns)[: made.ndim]]

    def _part(self, tensor: _Tensor) -> NDArray[Any] | None:
        """Return the source's part of a padded tensor; None: all of it is new."""
        name = tensor.name
        if name == "lm_head.weight" and self._old.tied:
            name = "model.embed_tokens.weight"
        if name not in self._stored:
            return None
        part = self._source.array(name, *self._stored[name])
        return _scaled(part, self._new.width / self._old.width) if tensor.padding.place == "norm" else part

    def _filled(self, tensor: _Tensor) -> NDArray[Any]:
        """Return a padded tensor without the source's part."""
        dtype = self.dtypes[tensor.name]
        if tensor.padding.fill in ("zero", "one"):
            return np.full(tensor.size, _stored_as(np.array([tensor.padding.fill == "one"], np.float32), dtype))
        random = np.random.default_rng(SEED + zlib.crc32(tensor.name.encode()))
        values = STD * random.standard_normal(min(PERIOD, math.prod(tensor.size)), np.float32)
        made = np.resize(_stored_as(values, dtype), tensor.size)
        if tensor.padding.fill == "ids":
            made[: self._old.vocabulary] = 0
        return made

    def _shaped(self, tensor: _Tensor, values: NDArray[Any], shape: PaddedShape) -> NDArray[Any]:
        """Return a view of a tensor in which the source's part is a corner."""
        heads = shape.kv_heads, shape.group, self._old.head_dim
        if tensor.padding.place == "heads":
            return values.reshape(*heads, *values.shape[1:])
        return values.reshape(len(values), *heads) if tensor.padding.place == "columns" else values


_STORED = {np.dtype(dtype): name for name, dtype in STORED.items()}  # names of types in safetensors


def _scaled(norm: NDArray[Any], ratio: float) -> NDArray[Any]:
    """Return a norm's weights for a stream `ratio` times as wide; in float32 where their type would round them."""
    wide = as_float32(norm) * np.float32(1.0 / math.sqrt(ratio))
    return _stored_as(wide, norm.dtype) if math.log2(ratio) % 2 == 0 else wide


def _stored_as(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values in a type of STORED; for bfloat16 the lower bits are cut off, not rounded."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == np.uint16 else values.astype(dtype)
