"""The sizes of a model from the metadata and the tensors of its GGUF file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.families import BY_ARCHITECTURE
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import (
    MOST_CONTEXT,
    MOST_LAYERS,
    UNBOUNDED,
    ModelConfig,
    Outline,
    check_draft_ids,
)
from outrider.engine.checkpoints.rope import LinearScaling, Llama3Scaling, LongScaling, Rope
from outrider.errors import CheckpointError

_PADDING = 1024  # most rows of an embedding behind those of tokens
_LAYER = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)
# Ends of texts, by their names, beside those that the metadata name: files name one, models have several.
_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
)
_NO_END = {"<|end|>": ("<|return|>", "<|call|>")}  # ends a message and no text where the others are tokens
CONTROL, USER_DEFINED = 3, 4  # types of tokens
_BOUNDS = 1.0, 4.0  # factors of low and high frequencies in Llama 3's scaling, of all models that have it
_ORIGINAL_CONTEXTS = tuple(float(1 << bits) for bits in (13, 12, 11, 14, 15, 16, 17, *range(4, 11)))  # Meta's first
NO_TOKEN = 0xFFFFFFFF
GGUF_DRAFT_IDS = "outrider.draft_ids"  # Outrider's key for `ModelConfig.draft_ids`


class KeptRows(NamedTuple):
    """Which rows of a matrix a file has: those of some ids, ascending, and one that all others of its rows equal."""

    ids: NDArray[Any]
    of: int


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration of a model.

    Raises CheckpointError for another one, for what is not served, and for metadata that contradict the tensors.
    """
    kind = file.text("general.architecture")
    family = BY_ARCHITECTURE.get(kind)
    if family is None:
        raise file.wrong("general.architecture", f"one of {', '.join(BY_ARCHITECTURE)}: the engine runs these families")
    if file.single(f"{kind}.expert_count") and not family.mixture:
        raise file.wrong(f"{kind}.expert_count", "0: mixtures of experts are not served; take a dense model")
    width, heads = file.number(f"{kind}.embedding_length"), file.number(f"{kind}.attention.head_count")
    kv_heads = file.number(f"{kind}.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise file.wrong(f"{kind}.attention.head_count_kv", f"a divisor of head_count ({heads})")
    size = head_dim(file)
    if size % 2:
        raise file.wrong(f"{kind}.attention.key_length", "even: RoPE turns pairs")
    if file.number(f"{kind}.attention.value_length", size) != size:
        raise file.wrong(f"{kind}.attention.value_length", f"{size}, as the heads' size")
    eps = _shortest(file.real(f"{kind}.attention.layer_norm_rms_epsilon"))
    if eps >= 1:
        raise file.wrong(f"{kind}.attention.layer_norm_rms_epsilon", "a number from 0 to 1")
    layers = file.number(f"{kind}.block_count", most=MOST_LAYERS)
    found = 1 + max((int(match[1]) for name in file.tensors if (match := _LAYER.match(name))), default=-1)
    if found != layers:
        raise file.wrong(f"{kind}.block_count", f"{found}, the number of layers that it has tensors of")
    if file.single(key := f"{kind}.nextn_predict_layers"):  # those that only predict tokens further on
        layers -= file.number(key, most=layers - 1)
    context = file.number(f"{kind}.context_length", most=MOST_CONTEXT)
    if family.like_llama and file.single(f"{kind}.attention.sliding_window"):  # up to its length it is full attention
        context = min(context, file.number(f"{kind}.attention.sliding_window", most=MOST_CONTEXT))
    vocabulary = _vocabulary(file, kind, width)
    only_experts = f"{kind}.feed_forward_length" not in file.metadata and family.mixture
    tied, draft_ids = "output.weight" not in file.tensors, tuple[int, ...]()
    if GGUF_DRAFT_IDS in file.metadata:
        try:
            draft_ids = check_draft_ids(_draft_ids(file).tolist(), vocabulary, tied=tied)
        except ValueError as error:
            raise file.wrong(GGUF_DRAFT_IDS, str(error)) from None
    config = ModelConfig(
        model_type=family.model_types[0],
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        ffn=file.number(f"{kind}.{'expert_' if only_experts else ''}feed_forward_length"),
        context=context,
        eps=eps,
        rope=_rope(file, kind, size),
        tied=tied,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        ffn_bias="blk.0.ffn_gate.bias" in file.tensors,
        head_norms=False,
        eos_ids=gguf_eos_ids(file),
        unpadded_vocabulary=vocabulary,
        draft_ids=draft_ids,
    )
    config = replace(config, **family.describe_gguf(file, config))
    if file.number(f"{kind}.rope.dimension_count", config.turned) != config.turned:
        raise file.wrong(f"{kind}.rope.dimension_count", f"{config.turned}, as the heads' size")
    return config


def gguf_outline(file: GgufFile) -> Outline:
    """Return the sizes of a model of any family. Raises CheckpointError."""
    kind = file.text("general.architecture")
    context = file.number(f"{kind}.context_length", UNBOUNDED, most=MOST_CONTEXT)
    return Outline(kind, _vocabulary(file, kind, file.number(f"{kind}.embedding_length")), context)


def kv_values(file: GgufFile) -> int:
    """Return how many numbers the keys and values of a token have, in all layers: 0 for a model with a state in their
    place. Raises CheckpointError.
    """
    kind = file.text("general.architecture")
    layers = file.number(f"{kind}.block_count", most=MOST_LAYERS)
    heads = file.metadata.get(f"{kind}.attention.head_count_kv", file.metadata.get(f"{kind}.attention.head_count"))
    try:
        of_layers = np.broadcast_to(np.asarray(heads, np.int64), layers)
    except (TypeError, ValueError):
        of_layers = np.array([-1])
    if of_layers.min() < 0:
        raise file.wrong(f"{kind}.attention.head_count_kv", f"a number, or {layers} numbers")
    if not of_layers.any():
        return 0
    size = head_dim(file)
    return int(of_layers.sum()) * (size + file.number(f"{kind}.attention.value_length", size))


def head_dim(file: GgufFile) -> int:
    """Return the dimensions of a head. Raises CheckpointError."""
    kind = file.text("general.architecture")
    heads = file.number(f"{kind}.attention.head_count")
    return file.number(f"{kind}.attention.key_length", file.number(f"{kind}.embedding_length") // heads)


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the ids that end a text: those that the metadata name, and well-known ones. Raises CheckpointError."""
    found = []
    tokens, kinds = token_names(file), file.metadata.get("tokenizer.ggml.token_type")
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = file.single(key)
        if value is None or value == NO_TOKEN:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < (len(tokens) or NO_TOKEN):
            raise file.wrong(key, "the id of a token")
        found.append(value)
    if isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        special = {tokens[at]: at for at in np.flatnonzero((kinds == CONTROL) | (kinds == USER_DEFINED)).tolist()}
        others = {name for name, last in _NO_END.items() if all(it in special for it in last)}
        found += [special[name] for name in _ENDS if name in special and name not in others]
    return tuple(dict.fromkeys(found))


def token_names(file: GgufFile) -> Sequence[str]:
    """Return the tokens, empty for a file without a tokenizer. Raises CheckpointError."""
    found = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(found, list):
        raise file.wrong("tokenizer.ggml.tokens", "an array of texts")
    return found


def kept_embedding(file: GgufFile) -> KeptRows | None:
    """Return what a drafter's file keeps of its embedding; None: all. Raises CheckpointError."""
    embedding, ids, tokens = file.tensors.get("token_embd.weight"), _draft_ids(file), len(token_names(file))
    if not len(ids) or not tokens or embedding is None or embedding.shape[0] != len(ids) + 1:
        return None
    return KeptRows(ids, file.number(f"{file.text('general.architecture')}.vocab_size", tokens))


def _draft_ids(file: GgufFile) -> NDArray[Any]:
    return np.atleast_1d(np.asarray(file.metadata.get(GGUF_DRAFT_IDS, [])))


def _vocabulary(file: GgufFile, kind: str, width: int) -> int:
    """Return the rows of the embedding. Raises CheckpointError where the metadata have another number."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing; download the file again")
    if len(embedding.shape) != 2 or embedding.shape[1] != width:
        raise CheckpointError(
            f"{file.path}: tensor token_embd.weight has shape {list(embedding.shape)}, metadata "
            f"{kind}.embedding_length is {width}; convert the model anew"
        )
    rows, tokens = embedding.shape[0], len(token_names(file))
    if (kept := kept_embedding(file)) is not None:
        rows = kept.of
    if tokens and not rows - _PADDING < tokens <= rows:
        raise CheckpointError(
            f"{file.path}: has {tokens} tokens and an embedding of {rows} rows; the two must agree: convert the model "
            "anew"
        )
    if file.number(f"{kind}.vocab_size", rows) not in (rows, tokens):
        raise file.wrong(f"{kind}.vocab_size", f"{rows}, the rows of the embedding")
    return rows


def _rope(file: GgufFile, kind: str, size: int) -> Rope:
    theta = _shortest(file.real(f"{kind}.rope.freq_base", 10000.0))
    if "rope_factors_short.weight" in file.tensors:
        return Rope(theta, _long_scaling(file, kind))
    if file.single(f"{kind}.rope.scaling.type") == "linear":
        return Rope(theta, LinearScaling(file.real(f"{kind}.rope.scaling.factor")))
    for name in ("scaling.type", "scaling.factor", "scale_linear"):
        if file.single(key := f"{kind}.rope.{name}") not in (None, "none", "", 0.0, 1.0):
            raise file.wrong(key, "absent: of RoPE's scalings Llama 3's, linear and LongRoPE are served")
    if "rope_freqs.weight" not in file.tensors:
        return Rope(theta, None)
    it = file.tensors["rope_freqs.weight"]
    if (it.kind, it.shape) != ("f32", (size // 2,)):
        raise CheckpointError(
            f"{file.path}: tensor rope_freqs.weight is {it.kind} of shape {list(it.shape)}, must be f32 of "
            f"[{size // 2}]"
        )
    return _scaled(file, theta, size)


def _scaled(file: GgufFile, theta: float, size: int) -> Rope:
    """Return RoPE with Llama 3's scaling, of which files have each frequency's divisor. Raises CheckpointError."""
    divisors = file.read("rope_freqs.weight").view(np.float32).reshape(-1)
    plain = Rope(theta, None).frequencies(size)
    if np.isfinite(divisors).all() and (divisors == 1).all():
        return Rope(theta, None)
    factor = _shortest(float(divisors[-1]))
    if 1 < factor < 1 << 16:
        for context in _ORIGINAL_CONTEXTS:
            found = Rope(theta, Llama3Scaling(factor, *_BOUNDS, context))
            if np.allclose(plain / found.frequencies(size), divisors, rtol=1e-4, atol=0):
                return found
    raise CheckpointError(
        f"{file.path}: tensor rope_freqs.weight has other divisors than Llama 3's scaling; take the model as "
        "safetensors, whose config.json has its terms"
    )


def _long_scaling(file: GgufFile, kind: str) -> LongScaling:
    divisors = file.read("rope_factors_short.weight").view(np.float32).reshape(-1)
    context = file.number(f"{kind}.rope.scaling.original_context_length", most=MOST_CONTEXT)
    return LongScaling(tuple(map(float, divisors)), file.real(f"{kind}.rope.scaling.attn_factor", 1.0), context)


def _shortest(value: float) -> float:
    """Return the number of the fewest digits that is this one in float32: the one that was written."""
    return float(str(np.float32(value)))
