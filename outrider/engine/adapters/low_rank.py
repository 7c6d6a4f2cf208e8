"""Reads a low-rank adapter in PEFT's format (LoRA, arXiv 2106.09685): B A x is added to what a linear gives for x."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_json
from outrider.errors import CheckpointError

FILES = CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 512
QKV, OUTPUT, GATE_UP, DOWN = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
MODULES = {name: block for block, names in (("self_attn", QKV + OUTPUT), ("mlp", GATE_UP + DOWN)) for name in names}
LinearName = Literal["qkv", "output", "gate_up", "down"]
JOINED: dict[LinearName, tuple[str, ...]] = {  # the weights that each linear of a layer joins in our engines
    "qkv": QKV,
    "output": OUTPUT,
    "gate_up": GATE_UP,
    "down": DOWN,
}

_TENSOR = re.compile(r"base_model\.model\.(model\.layers\.(\d{1,5})\.(self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")
_UNCHANGED: tuple[
    tuple[str, tuple[Any, ...], str], ...
] = (  # keys whose effect passes do not compute, and the values that have none
    ("peft_type", ("LORA",), "an adapter of another kind than LoRA"),
    ("use_dora", (None, False), "weights that are decomposed (DoRA)"),
    ("bias", (None, "none"), "biases of its own"),
    ("lora_bias", (None, False), "biases of its own"),
    ("fan_in_fan_out", (None, False), "transposed weights"),
    ("modules_to_save", (None, []), "complete modules beside the low-rank ones"),
    ("layer_replication", (None, []), "layers that are repeated"),
    ("trainable_token_indices", (None, [], {}), "embeddings of its own"),
    ("alora_invocation_tokens", (None, []), "a beginning from which on it has an effect"),
)
# Initializations that change the base model, so that the adapter alone is not its difference from the original one.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "eva")


class LowRankUpdate(NamedTuple):
    """What is added to one weight: B A, [outputs, inputs]."""

    a: NDArray[np.float32]  # [rank, inputs]
    b: NDArray[np.float32]  # [outputs, rank], times the adapter's scale


@dataclass(frozen=True, slots=True)
class LowRankAdapter:
    """An adapter for a model of the Llama family."""

    layers: Mapping[int, Mapping[str, LowRankUpdate]]  # by layer, then by the weight's name, one of MODULES
    rank: int  # the largest one
    digest: str  # of its files, 16 bytes in hexadecimal

    @property
    def parameters(self) -> int:
        """Number of its parameters."""
        return sum(it.a.size + it.b.size for layer in self.layers.values() for it in layer.values())


def adapter_folder(root: Path, name: str) -> Path | None:
    """Return the path of an adapter's folder, if it exists and is below the root."""
    root = root.resolve()
    try:
        path = (root / name).resolve()
        return path if root in path.parents and path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # a name that is too long, a zero byte, a loop of links
        return None


def read_adapter(folder: Path, config: ModelConfig) -> LowRankAdapter:
    """Read the adapter of a model with that configuration. Raises CheckpointError, which names what does not fit."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of an adapter in PEFT's format")
    terms = read_json(folder / CONFIG)
    _check(terms, folder / CONFIG)
    weights = Weights(folder, single=TENSORS)
    found: dict[tuple[int, str], dict[str, str]] = {}  # names of A and B, by layer and module
    for name in weights.files:
        match = _TENSOR.fullmatch(name)
        if match is None or MODULES.get(match[4]) != match[3] or int(match[2]) >= config.layers:
            raise CheckpointError(
                f"{folder / TENSORS}: {name} is not of a linear that can be adapted: {', '.join(MODULES)} of layers "
                f"0 to {config.layers - 1}; train an adapter of this model with these as target_modules"
            )
        found.setdefault((int(match[2]), match[4]), {})[match[5]] = name
    if not found:
        raise CheckpointError(f"{folder / TENSORS}: holds no adapter; save it anew")
    layers: dict[int, dict[str, LowRankUpdate]] = {}
    for (layer, module), names in sorted(found.items()):
        path = f"model.layers.{layer}.{MODULES[module]}.{module}"
        layers.setdefault(layer, {})[module] = _update(weights, config, terms, path, names, folder / TENSORS)
    rank = max(len(it.a) for layer in layers.values() for it in layer.values())
    return LowRankAdapter(layers, rank, _digest(folder))


def _check(terms: Mapping[str, Any], file: Path) -> None:
    for key, allowed, what in _UNCHANGED:
        if terms.get(key) not in allowed:
            raise CheckpointError(f"{file}: {key} is {terms[key]!r}: {what} cannot be served; train it without")
    begun = terms.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights is {begun!r}, which changes the base model; save the adapter as a LoRA of the "
            "original one, and set this key to true"
        )


def _update(
    weights: Weights, config: ModelConfig, terms: Mapping[str, Any], path: str, names: Mapping[str, str], file: Path
) -> LowRankUpdate:
    """Return the change of the weight at `path` of the model. Raises CheckpointError."""
    if len(names) < 2:
        raise CheckpointError(f"{file}: {path} has no lora_{'B' if 'A' in names else 'A'}; save the adapter anew")
    outputs, inputs = linear_shape(config, path.rpartition(".")[2])
    shape = weights.shape(names["A"])
    rank = shape[0] if len(shape) == 2 else 0
    if not 1 <= rank <= min(MOST_RANK, inputs):
        raise CheckpointError(f"{file}: {names['A']} has rank {rank}, must be 1 to {min(MOST_RANK, inputs)}")
    scale = _scale(terms, path, rank, file)
    a = _floats(weights.array(names["A"], rank, inputs))
    b = _floats(weights.array(names["B"], outputs, rank)) * np.float32(scale)
    for name, values in ((names["A"], a), (names["B"], b)):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file}: {name} holds numbers that are not finite; train it anew")
    return LowRankUpdate(a, b)


def linear_shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """Return outputs and inputs of a weight."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": (queries, config.width),
        "k_proj": (keys, config.width),
        "v_proj": (keys, config.width),
        "o_proj": (config.width, queries),
        "gate_proj": (config.ffn, config.width),
        "up_proj": (config.ffn, config.width),
        "down_proj": (config.width, config.ffn),
    }[module]


def _scale(terms: Mapping[str, Any], path: str, rank: int, file: Path) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732); alpha may differ by module."""
    alpha = terms.get("lora_alpha")
    patterns = terms.get("alpha_pattern") or {}
    if isinstance(patterns, dict):
        alpha = next((patterns[key] for key in patterns if _names(key, path, file)), alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < abs(alpha) < 1e6:
        raise CheckpointError(f"{file.with_name(CONFIG)}: lora_alpha of {path} is {alpha!r}, must be a number")
    return float(alpha) / (rank**0.5 if terms.get("use_rslora") else rank)


def _names(pattern: str, path: str, file: Path) -> bool:
    """Whether a key of `alpha_pattern` names a module, by the end of its path."""
    if len(pattern) > 200 or not re.fullmatch(r"[\w.^$]+", pattern):  # other expressions could take for ever
        raise CheckpointError(f"{file.with_name(CONFIG)}: alpha_pattern has {pattern[:40]!r}, must be a module's name")
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def _floats(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers as stored in a checkpoint, 16-bit integers being the bits of bfloat16, in float32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def read_files(folder: Path, digest: str) -> list[bytes]:
    """Return the contents of an adapter's FILES. Raises CheckpointError where they are not those with that digest."""
    found, contents = blake2b(digest_size=16), []
    for blocks in _blocks(folder):
        contents.append(b"".join(blocks))
        found.update(contents[-1])
    if found.hexdigest() != digest:
        raise CheckpointError(f"{folder}: its files have changed while they were read; load the adapter again")
    return contents


def _digest(folder: Path) -> str:
    digest = blake2b(digest_size=16)
    for blocks in _blocks(folder):
        for block in blocks:
            digest.update(block)
    return digest.hexdigest()


def _blocks(folder: Path) -> Iterator[Iterator[bytes]]:
    """Yield the blocks of each of an adapter's files. Raises CheckpointError."""

    def read(path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    yield block
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None

    return (read(folder / name) for name in FILES)
