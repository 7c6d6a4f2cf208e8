"""GGUF files of small models whose weights are random blocks of any type, as large as those of real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider.engine.checkpoints.block_types import TYPES, dequantize
from tests.engine.gguf.small_files import NORMAL, Made, random_rows, write

WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY, LAYERS, CONTEXT = 256, 4, 2, 64, 512, 131, 2, 256
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_gate": (FFN, WIDTH),
    "ffn_up": (FFN, WIDTH),
    "ffn_down": (WIDTH, FFN),
}
# The first byte of a block's scale, and what an offset, which follows it, is of the scale.
SCALES = {"q2_k": 80, "q3_k": 108, "q6_k": 208} | dict.fromkeys(
    ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "iq4_nl", "iq4_xs"), 0
)
OFFSETS = {"q4_1": -7.5, "q5_1": -15.5, "q2_k": 1.5, "q4_k": 7.5, "q5_k": 15.5}
DEVIATION = 0.06


def blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows of a type, whose values have mean 0 and that deviation, or nearly."""
    if kind in ("f32", "f16", "bf16"):
        values = (DEVIATION * np.random.default_rng(seed).standard_normal((rows, columns))).astype(np.float32)
        if kind == "bf16":
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        return (values if kind == "f32" else values.astype(np.float16)).view(np.uint8)
    found = random_rows(kind, rows, columns, seed)
    each = found.reshape(rows, -1, TYPES[kind].bytes)
    if kind == "mxfp4":
        each[..., 0] = 121
        return found

    def scaled(scale: float) -> None:
        at = SCALES[kind]
        each[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        if kind in OFFSETS:
            each[..., at + 2 : at + 4] = np.array([scale * OFFSETS[kind]], np.float16).view(np.uint8)

    scaled(0.01)
    scaled(0.01 * DEVIATION / float(dequantize(kind, found).std()))
    return found


def model_file(path: Path, kind_of: Callable[[str], str], *, tied: bool = True) -> Path:
    """Write a model. `kind_of` gives the type of a tensor by its name, as "blk.0.attn_q" and "token_embd"."""
    random = np.random.default_rng(1)

    def vector(count: int) -> Made:
        return Made("f32", (count,), (1 + 0.1 * random.standard_normal(count)).astype(np.float32).tobytes())

    shapes = {"token_embd": (VOCABULARY, WIDTH)} | ({} if tied else {"output": (VOCABULARY, WIDTH)})
    tensors = {"output_norm.weight": vector(WIDTH)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": vector(WIDTH) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in SHAPES.items()}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = kind_of(name)
        tensors[f"{name}.weight"] = Made(kind, shape, blocks(kind, *shape, seed=number).tobytes())
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*"!\"#$%&'()*+,-./0123456789", *(f"<{number}>" for number in range(VOCABULARY - 25))],
        "tokenizer.ggml.token_type": [NORMAL] * VOCABULARY,
        "tokenizer.ggml.merges": ["! !"],
    }
    return write(path, metadata, tensors)
