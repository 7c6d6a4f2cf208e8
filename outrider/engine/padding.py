"""Padding: a checkpoint that costs like a larger one and says the same. For benchmarks and demonstrations.

Everything new is inert. The new channels of the residual stream stay zero because every row that writes to them is
zero; new heads and new feed-forward units write through zero columns; new layers write through zero projections.
All that may be anything is random, so that it costs what real weights cost. The RMS norms divide by the mean over
more channels: their weights shrink by sqrt(old / new) and eps by old / new, both exact when the ratio is a power of 4.

Acceptance is the small model's: a drafter that is good at the small one is as good at the padded one. Skipping inert
layers is free, so never measure self-speculation on a padded checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine.checkpoint import SINGLE, ModelConfig, Weights, read_config, read_json
from outrider.errors import CheckpointError

SEED = 20240229  # of the inert weights
STD = 0.02  # of the inert weights
FFN_TILE = 64  # feed-forward sizes are multiples of this
# Proportions of models of this family: units of the feed-forward, and layers, for the width.
FFN_PER_WIDTH = 2.75
WIDTH_PER_LAYER = 85
MOST_LAYERS = 128
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """What padding may change of a model. Query heads a KV head and the size of a head stay."""

    width: int
    layers: int
    kv_heads: int
    ffn: int


def pad_checkpoint(source: Path, destination: Path, *, parameters: int) -> int:
    """Writes a checkpoint of about `parameters` parameters that says what `source` says; returns how many it has.

    `destination` must not exist, or be empty; it appears complete or not at all. The tensors keep the type that they
    are stored in. Raises CheckpointError when `source` is no good or has more parameters, or `destination` is in use.
    """
    config = read_config(source)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination}: exists already; choose a folder that does not")
    old = Shape(config.width, config.layers, config.kv_heads, config.ffn)
    new = choose_shape(config, parameters)
    if new is None:
        raise CheckpointError(
            f"{source}: has {count_parameters(config, old)} parameters already; ask for more than {parameters}"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        save_file(dict(_padded(Weights(source), config, old, new)), made / SINGLE, metadata={"format": "pt"})
        raw = read_json(source / "config.json")
        for per_layer in ("layer_types", "max_window_layers"):
            raw.pop(per_layer, None)
        raw.update(
            hidden_size=new.width,
            num_hidden_layers=new.layers,
            num_attention_heads=new.kv_heads * config.group,
            num_key_value_heads=new.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=new.ffn,
            rms_norm_eps=config.eps * old.width / new.width,
        )
        (made / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for name in COPIED:
            if (source / name).exists():
                shutil.copyfile(source / name, made / name)
        os.replace(made, destination)
    return count_parameters(config, new)


def count_parameters(config: ModelConfig, shape: Shape) -> int:
    """Parameters of the model, were it of that shape."""
    return sum(math.prod(size) for _, size, _, _ in _tensors(config, shape))


def choose_shape(config: ModelConfig, parameters: int) -> Shape | None:
    """The shape closest to the family's proportions with about that many parameters; None when none is that small."""
    old = Shape(config.width, config.layers, config.kv_heads, config.ffn)
    best: tuple[float, Shape] | None = None
    for power in range(5):
        width = config.width * 4**power
        # Doubled until the heads together are about as wide as the stream; transformers wants a divisor of the width.
        doublings = max(0, round(math.log2(width / (config.head_dim * config.heads))))
        kv_heads = config.kv_heads * 2**doublings
        bare, one = (count_parameters(config, Shape(width, layers, kv_heads, config.ffn)) for layers in (0, 1))
        tile = (3 * width + (2 if config.ffn_bias else 0)) * FFN_TILE
        for layers in range(config.layers, MOST_LAYERS + 1):
            tiles = round((parameters - bare - layers * (one - bare)) / (layers * tile))
            shape = Shape(width, layers, kv_heads, config.ffn + tiles * FFN_TILE)
            if tiles < 0 or shape == old:
                continue
            strain = abs(math.log(shape.ffn / (FFN_PER_WIDTH * width)))
            strain += abs(math.log(layers * WIDTH_PER_LAYER / width))
            if best is None or strain < best[0]:
                best = strain, shape
    return None if best is None else best[1]


# A tensor: its name, its size, what fills the part that is new ("zero", "random", "one"), and a factor on the old part
# that padding the width brings ("norm") or not ("").
_Tensor = tuple[str, tuple[int, ...], str, str]


def _tensors(config: ModelConfig, shape: Shape) -> Iterator[_Tensor]:
    """All tensors of a checkpoint of that shape."""
    width, ffn = shape.width, shape.ffn
    keys = shape.kv_heads * config.head_dim
    queries = keys * config.group
    yield "model.embed_tokens.weight", (config.vocabulary, width), "zero", ""
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        yield f"{prefix}.input_layernorm.weight", (width,), "one", "norm"
        yield f"{prefix}.post_attention_layernorm.weight", (width,), "one", "norm"
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{attention}.{name}_proj.weight", (size, width), "random", ""
            if config.qkv_bias:
                yield f"{attention}.{name}_proj.bias", (size,), "random", ""
        if config.head_norms:
            yield f"{attention}.q_norm.weight", (config.head_dim,), "one", ""
            yield f"{attention}.k_norm.weight", (config.head_dim,), "one", ""
        yield f"{attention}.o_proj.weight", (width, queries), "zero", ""
        if config.output_bias:
            yield f"{attention}.o_proj.bias", (width,), "zero", ""
        for name in ("gate", "up"):
            yield f"{mlp}.{name}_proj.weight", (ffn, width), "random", ""
            if config.ffn_bias:
                yield f"{mlp}.{name}_proj.bias", (ffn,), "random", ""
        yield f"{mlp}.down_proj.weight", (width, ffn), "zero", ""
        if config.ffn_bias:
            yield f"{mlp}.down_proj.bias", (width,), "zero", ""
    yield "model.norm.weight", (width,), "one", "norm"
    if not config.tied:
        yield "lm_head.weight", (config.vocabulary, width), "random", ""


def _padded(weights: Weights, config: ModelConfig, old: Shape, new: Shape) -> Iterator[tuple[str, Tensor]]:
    """The padded tensors, by name. Old heads, units and channels come first, so every head keeps its KV head."""
    stored = {name: size for name, size, _, _ in _tensors(config, old)}
    factor = math.sqrt(old.width / new.width)
    random = torch.Generator().manual_seed(SEED)
    dtype = weights.take("model.embed_tokens.weight", config.vocabulary, old.width).dtype
    for name, size, fill, scale in _tensors(config, new):
        tensor = torch.empty(size, dtype=dtype)
        if fill == "random":
            tensor.normal_(0.0, STD, generator=random)
        else:
            tensor.fill_(1.0 if fill == "one" else 0.0)
        if name in stored:
            part = weights.take(name, *stored[name])
            tensor = tensor.to(part.dtype)
            corner = tuple(slice(0, length) for length in part.shape)
            tensor[corner] = part * factor if scale == "norm" else part
        yield name, tensor
