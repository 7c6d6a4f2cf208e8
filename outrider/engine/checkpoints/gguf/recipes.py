"""Which type each weight of a quantized file gets: llama.cpp's mixtures."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.engine.checkpoints.block_types import TYPES
from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.checkpoints.gguf.writer import KindOf, write_weights
from outrider.engine.checkpoints.model_config import ModelConfig
from outrider.engine.checkpoints.padding import PaddedWeights, padded_shape

_LAYER = re.compile(r"blk\.(\d+)\.")
# Types for rows that are no whole blocks of another one.
_SHORTER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def pad_to_gguf(source: Path, destination: Path, to: str, parameters: int, threads: int | None = None) -> None:
    """Write a padded checkpoint as a GGUF file in a mixture, without a copy in a larger type; see `pad_checkpoint`.

    Raises CheckpointError.
    """
    config = read_config(source)
    padded = PaddedWeights(Weights(source), config, padded_shape(source, config, parameters))
    write_weights(padded, padded.config, destination, recipe(to, padded.config), source, threads)


def recipe(name: str, config: ModelConfig) -> KindOf:
    """Return the types of a mixture's weights, as "Q4_K_M" and "Q8_0".

    `_M` has values and second projections in q6_k in the first and the last eighth of the layers and in every third
    layer between. The head, which may be the embedding, is q6_k, but for types of at least as many bits.
    """
    kind, plus = name.lower().removesuffix("_m"), name.endswith("_M")
    best = kind if kind in ("q8_0", "f16", "bf16", "f32") else "q6_k"
    head = "token_embd.weight" if config.tied else "output.weight"

    def kind_of(tensor: str, shape: tuple[int, ...]) -> str:
        layer = _LAYER.match(tensor)
        counts = plus and layer is not None and tensor.endswith(("attn_v.weight", "ffn_down.weight"))
        wanted = best if tensor == head or (counts and layer is not None and more_bits(int(layer[1]))) else kind
        while shape[-1] % TYPES[wanted].values:
            wanted = _SHORTER.get(wanted, "f16")
        return wanted

    def more_bits(layer: int) -> bool:
        first, last = config.layers // 8, 7 * config.layers // 8
        return layer < first or layer >= last or (layer - first) % 3 == 2

    return kind_of
