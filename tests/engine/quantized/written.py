"""Small models in the hub's quantized formats, written from their definitions, and the values that they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

Floats = NDArray[np.float32]
Tensors = dict[str, torch.Tensor]

WIDTH, FFN, VOCABULARY, HEADS, KV_HEADS, LAYERS = 256, 512, 131, 4, 2, 2
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (FFN, WIDTH),
    "mlp.up_proj": (FFN, WIDTH),
    "mlp.down_proj": (WIDTH, FFN),
}
NORMS = [f"model.layers.{n}.{it}_layernorm.weight" for n in range(LAYERS) for it in ("input", "post_attention")] + [
    "model.norm.weight"
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Layout(NamedTuple):
    """A way to keep a weight, and what the configuration says of it."""

    config: dict[str, Any]
    weight: Callable[[np.random.Generator, int, int], tuple[Tensors, Floats]]  # its tensors by suffix, and its values
    kind: str  # of the blocks that it becomes


def words(codes: NDArray[Any], bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes in words of 32 bits along an axis. `order`: which code of the word each place of it has."""
    each = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    found = np.zeros((*moved.shape[:-1], -(-moved.shape[-1] // each)), np.uint32)
    for place, code in enumerate(order or range(each)):
        part = moved[..., code::each].astype(np.uint32) << np.uint32(bits * place)
        found[..., : part.shape[-1]] |= part
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(found, -1, axis)).view(np.int32))


def drawn(
    random: np.random.Generator, bits: int, rows: int, columns: int, group: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Random codes, zeros and scales, [rows, columns] and [rows, groups], and the group of each column."""
    codes = random.integers(0, 1 << bits, (rows, columns))
    zeros = random.integers(3 << bits - 3, 5 << bits - 3, (rows, columns // group))
    zeros[:2] = [[1], [(1 << bits) - 1]]
    scales = torch.from_numpy(0.12 / (1 << bits) * (1 + random.random((rows, columns // group)))).to(dtype)
    return codes, zeros, scales, np.arange(columns) // group


def values(codes: NDArray[Any], zeros: NDArray[Any], scales: torch.Tensor, of: NDArray[Any]) -> Floats:
    return scales.float().numpy()[:, of] * (codes - zeros[:, of]).astype(np.float32)


def awq(group: int) -> Layout:
    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        codes, zeros, scales, of = drawn(random, 4, rows, columns, group, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": words(codes.T, 4, 1, order), "qzeros": words(zeros.T, 4, 1, order), "scales": scales.T}
        return tensors, values(codes, zeros, scales, of)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Layout(config, weight, f"int4_{min(group, 128)}")


def gptq(bits: int, group: int, *, form: str = "gptq", sorted_by_group: bool = True) -> Layout:
    """`sorted_by_group`: else desc_act, the same order for all weights of as many inputs."""

    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        codes, zeros, scales, of = drawn(random, bits, rows, columns, group, torch.float16)
        if not sorted_by_group:
            of = np.random.default_rng(columns).permutation(of)
        tensors = {
            "qweight": words(codes.T, bits, 0),
            "qzeros": words(zeros.T - (form == "gptq"), bits, 1),
            "scales": scales.T,
            "g_idx": torch.from_numpy(of.astype(np.int32)),
        }
        return tensors, values(codes, zeros, scales, of)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": not sorted_by_group,
        "checkpoint_format": form,
    }
    return Layout(config, weight, f"int{bits}_{min(group, 128)}")


def packed(bits: int, group: int, *, symmetric: bool = True, sorted_by_group: bool = True) -> Layout:
    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        codes, zeros, scales, of = drawn(random, bits, rows, columns, group, torch.bfloat16)
        tensors = {
            "weight_packed": words(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if symmetric:
            zeros = np.full_like(zeros, 1 << bits - 1)
        else:
            tensors["weight_zero_point"] = words(zeros, bits, 0)
        if not sorted_by_group:
            of = np.random.default_rng(columns).permutation(of)
            tensors["weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
        return tensors, values(codes, zeros, scales, of)

    return Layout(compressed("pack-quantized"), weight, f"int{bits}_{min(group, 128)}")


def compressed(form: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}


def int8(group: int | None, *, symmetric: bool = True) -> Layout:
    """`group`: None is one for each output."""

    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        codes, zeros, scales, of = drawn(random, 8, rows, columns, group or columns, torch.bfloat16)
        zeros = np.full_like(zeros, 128) if symmetric else zeros
        tensors = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        return tensors, values(codes, zeros, scales, of)

    return Layout(compressed("int-quantized"), weight, "int8_128")


def fp8(scale: str, dtype: torch.dtype = torch.float32, suffix: str = "weight_scale_inv") -> Layout:
    """`scale`: for the "tensor", each "output", or each "block"."""

    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        bits = random.integers(0, 255, (rows, columns), dtype=np.uint8)
        bits[(bits & 127) == 127] = 0  # no number
        height, width = {"tensor": (rows, columns), "output": (1, columns), "block": (128, 128)}[scale]
        scales = torch.from_numpy(4e-4 * (1 + random.random((-(-rows // height), -(-columns // width))))).to(dtype)
        each = scales.float().numpy()[np.arange(rows) // height][:, np.arange(columns) // width]
        numbers = torch.from_numpy(bits).view(torch.float8_e4m3fn)
        kept = scales.reshape(()) if scale == "tensor" else scales
        return {"weight": numbers, suffix: kept}, each * numbers.float().numpy()

    return Layout({"quant_method": "fp8"}, weight, "fp8_128")


def nvfp4(*, divided: bool) -> Layout:
    """`divided`: as compressed-tensors; else as modelopt."""

    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        codes = random.integers(0, 16, (rows, columns))
        bits = random.integers(0, 127, (rows, columns // 16), dtype=np.uint8)  # down to zero and subnormal ones
        scales, total = torch.from_numpy(bits).view(torch.float8_e4m3fn), np.float32(2.0**-12)
        pairs = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        found = np.repeat(scales.float().numpy() * total, 16, axis=1) * E2M1[codes]
        if divided:
            return {
                "weight_packed": pairs,
                "weight_scale": scales,
                "weight_global_scale": torch.tensor([1 / total]),
            }, found
        return {"weight": pairs, "weight_scale": scales, "weight_scale_2": torch.tensor(total)}, found

    config = compressed("nvfp4-pack-quantized") if divided else {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return Layout(config, weight, "nvfp4_256")


def mxfp4() -> Layout:
    def weight(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Floats]:
        codes = random.integers(0, 16, (rows, columns))
        powers = random.integers(119, 123, (rows, columns // 32), dtype=np.uint8)
        pairs = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        scales = np.exp2(powers.astype(np.float32) - 127).astype(np.float32)
        return {"weight_packed": pairs, "weight_scale": torch.from_numpy(powers)}, np.repeat(scales, 32, axis=1) * E2M1[
            codes
        ]

    return Layout(compressed("mxfp4-pack-quantized"), weight, "mxfp4")


LAYOUTS = {
    "awq-128": awq(128),
    "awq-64": awq(64),
    "awq-32": awq(32),
    "gptq-128": gptq(4, 128),
    "gptq-32-v2": gptq(4, 32, form="gptq_v2"),
    "gptq-8-bits": gptq(8, 128),
    "gptq-desc-act": gptq(4, 64, sorted_by_group=False),
    "packed-128": packed(4, 128),
    "packed-asymmetric": packed(4, 128, symmetric=False),
    "packed-8-bits": packed(8, 128, symmetric=False),
    "packed-actorder": packed(4, 128, sorted_by_group=False),
    "int8-outputs": int8(None),
    "int8-asymmetric": int8(128, symmetric=False),
    "fp8-blocks": fp8("block"),
    "fp8-outputs": fp8("output", torch.bfloat16, "weight_scale"),
    "fp8-tensor": fp8("tensor", suffix="weight_scale"),
    "nvfp4-compressed": nvfp4(divided=True),
    "nvfp4-modelopt": nvfp4(divided=False),
    "mxfp4": mxfp4(),
}


def write(folder: Path, layout: Layout, *, quantized: Callable[[str], bool] = lambda _: True) -> dict[str, Floats]:
    """Write a model and return the values of its matrices by name. `quantized`: whether a linear is, by its name."""
    random = np.random.default_rng(1)
    tensors = {name: torch.ones(WIDTH) for name in NORMS}
    found: dict[str, Floats] = {}

    def plain(name: str, rows: int, columns: int) -> None:
        found[name] = (0.06 * random.standard_normal((rows, columns))).astype(np.float16).astype(np.float32)
        tensors[name] = torch.from_numpy(found[name]).half()

    plain("model.embed_tokens.weight", VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            stem = f"model.layers.{layer}.{name}"
            if not quantized(name):
                plain(f"{stem}.weight", *shape)
                continue
            parts, found[f"{stem}.weight"] = layout.weight(random, *shape)
            tensors |= {f"{stem}.{suffix}": it for suffix, it in parts.items()}
    _save(folder, tensors, {"quantization_config": layout.config})
    return found


def write_values(folder: Path, values: dict[str, Floats]) -> Path:
    """Write the model that has these matrices, in float32."""
    _save(
        folder, {name: torch.ones(WIDTH) for name in NORMS} | {n: torch.from_numpy(it) for n, it in values.items()}, {}
    )
    return folder


def _save(folder: Path, tensors: Tensors, more: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: it.contiguous() for name, it in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")).save(
        str(folder / "tokenizer.json")
    )
