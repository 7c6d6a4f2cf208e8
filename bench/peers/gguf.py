"""Writes a checkpoint folder of the Llama family as one GGUF file, the format of llama.cpp.

Only the model is written. There is no tokenizer (`tokenizer.ggml.model` is "no_vocab"), so readers of the file work on
token ids. Ids from `outrider_unpadded_vocabulary` on are in the file like any others; the sampler must exclude them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config
from outrider.engine.checkpoints.gguf.writer import rope_divisors
from outrider.errors import CheckpointError

_TYPES = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16}
_ADD: dict[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
}

Value = int | float | str


class GgufTensor(NamedTuple):
    """A tensor of the file, with the function that computes it."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file names them in the other order
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without the padding after them."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_gguf(folder: Path, path: Path, dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
    """Write the checkpoint in `folder` to `path` atomically.

    Matrices have the type `dtype`, norms float32. One tensor at a time is in memory. Raises CheckpointError for a
    checkpoint that llama.cpp's architecture "llama" does not cover.
    """
    config = read_config(folder)
    if config.head_norms or config.model_type not in ("llama", "mistral"):
        raise CheckpointError(f"{folder}: only models of type llama and mistral are written as GGUF")
    tensors, draft = list(gguf_tensors(Weights(folder), config, getattr(torch, dtype))), path.with_suffix(".part")
    writer = gguf.GGUFWriter(draft, "llama")
    for key, value in metadata(config).items():
        _ADD[type(value)](writer, key, value)
    for tensor in tensors:
        kind = _TYPES[tensor.dtype]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.void), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make().to(tensor.dtype).contiguous().view(torch.uint8).numpy())
    writer.close()
    os.replace(draft, path)


def metadata(config: ModelConfig) -> Mapping[str, Value]:
    """Return the keys that describe the model's shape to llama.cpp."""
    return {
        "llama.vocab_size": config.vocabulary,
        "llama.context_length": config.context,
        "llama.embedding_length": config.width,
        "llama.block_count": config.layers,
        "llama.feed_forward_length": config.ffn,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope.theta),
        "tokenizer.ggml.model": "no_vocab",
    }


def gguf_tensors(weights: Weights, config: ModelConfig, dtype: torch.dtype) -> Iterator[GgufTensor]:
    """Yield all tensors with llama.cpp's names.

    Rows of queries and keys are reordered: llama.cpp's RoPE rotates pairs of neighbours, a checkpoint's rotates pairs
    from the two halves of a head.
    """
    width, dim, ffn = config.width, config.head_dim, config.ffn
    queries, keys = config.heads * dim, config.kv_heads * dim

    def tensor(name: str, source: str, *shape: int, turned: bool = False) -> GgufTensor:
        def make() -> Tensor:
            taken = weights.take(source, *shape)
            return interleave(taken, dim) if turned else taken

        return GgufTensor(name, shape, dtype if len(shape) > 1 else torch.float32, make)

    yield tensor("token_embd.weight", "model.embed_tokens.weight", config.vocabulary, width)
    yield tensor("output_norm.weight", "model.norm.weight", width)
    if not config.tied:
        yield tensor("output.weight", "lm_head.weight", config.vocabulary, width)
    if config.rope.scaling is not None:
        yield GgufTensor("rope_freqs.weight", (dim // 2,), torch.float32, lambda: _rope_divisors(config))
    for index in range(config.layers):
        old, new = f"model.layers.{index}", f"blk.{index}"
        attention, mlp = f"{old}.self_attn", f"{old}.mlp"
        yield tensor(f"{new}.attn_norm.weight", f"{old}.input_layernorm.weight", width)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            turned = name != "v"
            yield tensor(f"{new}.attn_{name}.weight", f"{attention}.{name}_proj.weight", size, width, turned=turned)
            if config.qkv_bias:
                yield tensor(f"{new}.attn_{name}.bias", f"{attention}.{name}_proj.bias", size, turned=turned)
        yield tensor(f"{new}.attn_output.weight", f"{attention}.o_proj.weight", width, queries)
        if config.output_bias:
            yield tensor(f"{new}.attn_output.bias", f"{attention}.o_proj.bias", width)
        yield tensor(f"{new}.ffn_norm.weight", f"{old}.post_attention_layernorm.weight", width)
        for name, outputs, inputs in (("gate", ffn, width), ("up", ffn, width), ("down", width, ffn)):
            yield tensor(f"{new}.ffn_{name}.weight", f"{mlp}.{name}_proj.weight", outputs, inputs)
            if config.ffn_bias:
                yield tensor(f"{new}.ffn_{name}.bias", f"{mlp}.{name}_proj.bias", outputs)


def _rope_divisors(config: ModelConfig) -> Tensor:
    """Return the divisor of each frequency in Llama 3.1's scaling: [head_dim / 2]."""
    divisors = rope_divisors(config)
    assert divisors is not None
    return torch.from_numpy(divisors)


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Return the rows of a query or key projection, reordered so that the two numbers of a RoPE pair are neighbours.

    Checkpoints pair dimension j with j + head_dim / 2; neighbours are one complex number in memory.
    """
    heads = weight.shape[0] // head_dim
    paired = weight.reshape(heads, 2, head_dim // 2, *weight.shape[1:]).transpose(1, 2)
    return paired.reshape(weight.shape)
