"""Reads a low-rank adapter in PEFT's format (LoRA, arXiv 2106.09685): B A x is added to what a linear gives for x."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.checkpoint import ModelConfig, parse_json
from outrider.engine.checkpoints.files import ReadFile, read_file
from outrider.engine.checkpoints.stored_tensors import StoredTensors, safetensors_layout
from outrider.errors import CheckpointError, ConfigError

FILES = CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 512
MOST_PATTERNS = 4096  # of the configuration: entries of alpha_pattern
MOST_CONFIG = 1 << 20  # bytes of the configuration, and of the other file's header
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
_OTHER = re.compile(r"base_model\.model\.[\w.]{1,80}\.lora_[AB]\.weight", re.ASCII)  # a name that an error may quote
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
_Alphas = list[tuple[re.Pattern[str], Any]]  # what a module's path has to match, and its alpha
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
    """Return the path of an adapter's folder, if it exists and is below the root, with no link on the way there."""
    root = root.resolve()
    try:
        path = (root / name).resolve()
        if path != Path(os.path.abspath(root / name)):
            return None
        return path if root in path.parents and path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # a name that is too long, a zero byte, a loop of links
        return None


class AdapterLoader(ABC):
    """Loads the adapters of an engine: handles that segments have."""

    most_bytes: int  # of an adapter's weights

    def load(self, folder: Path) -> tuple[object, LowRankAdapter]:
        """Return an adapter and what was read; see `Engine.load_adapter`."""
        return self.pack(read_files(folder, self.most_bytes))

    @abstractmethod
    def pack(self, files: AdapterFiles) -> tuple[object, LowRankAdapter]:
        """Return the adapter that files hold, and what was read of them."""


class NoAdapters(AdapterLoader):
    """The adapters of an engine that has none."""

    most_bytes = 0

    def __init__(self, why: str) -> None:
        self._why = why

    def load(self, folder: Path) -> tuple[object, LowRankAdapter]:
        raise ConfigError(f"adapters: {self._why}")

    def pack(self, files: AdapterFiles) -> tuple[object, LowRankAdapter]:
        return self.load(files.folder)


class AdapterFiles(NamedTuple):
    """The files of an adapter, read once: what is loaded, what its digest is of, and what other ranks receive."""

    folder: Path
    contents: tuple[ReadFile, ReadFile]  # of each of FILES

    @property
    def digest(self) -> str:
        """Their digest, 16 bytes in hexadecimal."""
        digest = blake2b(digest_size=16)
        for file in self.contents:
            digest.update(file.content.data)
        return digest.hexdigest()


def read_files(folder: Path, most: int) -> AdapterFiles:
    """Read an adapter's files into memory. `most`: bytes that its weights may have; see `most_bytes`.

    No file may be a symbolic link, and no other file is read. Raises CheckpointError.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of an adapter in PEFT's format")
    config = read_file(folder / CONFIG, MOST_CONFIG, links=False)
    return AdapterFiles(folder, (config, read_file(folder / TENSORS, most, links=False)))


def most_bytes(config: ModelConfig) -> int:
    """Return the bytes that an adapter of a model can have: of the largest rank on all linears, in float32."""
    return MOST_CONFIG + 4 * MOST_RANK * config.layers * sum(sum(linear_shape(config, module)) for module in MODULES)


def read_adapter(folder: Path, config: ModelConfig) -> LowRankAdapter:
    """Read the adapter of a model with that configuration. Raises CheckpointError, which names what does not fit."""
    return parse_adapter(read_files(folder, most_bytes(config)), config)


def parse_adapter(files: AdapterFiles, config: ModelConfig) -> LowRankAdapter:
    """Return the adapter that files hold, for a model with that configuration. Raises CheckpointError.

    Errors name what does not fit, and quote no value of the files, which may be anybody's.
    """
    folder = files.folder
    terms = parse_json(files.contents[0])
    _check(terms, folder / CONFIG)
    patterns = _alphas(terms, folder / CONFIG)
    weights = StoredTensors(safetensors_layout(files.contents[1:]), folder / TENSORS)
    found: dict[tuple[int, str], dict[str, str]] = {}  # names of A and B, by layer and module
    for number, name in enumerate(weights.files, 1):
        match = _TENSOR.fullmatch(name)
        if match is None or MODULES.get(match[4]) != match[3] or not _adaptable(config, int(match[2]), match[3]):
            raise CheckpointError(
                f"{folder / TENSORS}: {name if _OTHER.fullmatch(name) else f'tensor {number}'} is not of a linear that "
                f"can be adapted: {', '.join(MODULES)} of layers 0 to {config.layers - 1}; train an adapter of this "
                "model with these as target_modules"
            )
        found.setdefault((int(match[2]), match[4]), {})[match[5]] = name
    if not found:
        raise CheckpointError(f"{folder / TENSORS}: holds no adapter; save it anew")
    layers: dict[int, dict[str, LowRankUpdate]] = {}
    for (layer, module), names in sorted(found.items()):
        path = f"model.layers.{layer}.{MODULES[module]}.{module}"
        scale = partial(_scale, terms, patterns, path, file=folder / TENSORS)
        layers.setdefault(layer, {})[module] = _update(weights, config, scale, path, names, folder / TENSORS)
    rank = max(len(it.a) for layer in layers.values() for it in layer.values())
    return LowRankAdapter(layers, rank, files.digest)


def _adaptable(config: ModelConfig, layer: int, part: str) -> bool:
    """Return whether a model has a layer with linears of that part, rather than experts."""
    experts = config.parts.experts
    if layer >= config.layers or (part == "self_attn" and config.parts.gated):
        return False
    return not (part == "mlp" and experts is not None and experts.layers[layer])


def _check(terms: Mapping[str, Any], file: Path) -> None:
    for key, allowed, what in _UNCHANGED:
        if terms.get(key) not in allowed:
            raise CheckpointError(f"{file}: {key} asks for {what}, which cannot be served; train it without")
    begun = terms.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights names a beginning that changes the base model; save the adapter as a LoRA of "
            "the original one, and set this key to true"
        )


def _update(
    weights: StoredTensors,
    config: ModelConfig,
    scale: Callable[[int], float],
    path: str,
    names: Mapping[str, str],
    file: Path,
) -> LowRankUpdate:
    """Return the change of the weight at `path` of the model. Raises CheckpointError.

    `scale`: returns what B is multiplied by, from the rank.
    """
    if len(names) < 2:
        raise CheckpointError(f"{file}: {path} has no lora_{'B' if 'A' in names else 'A'}; save the adapter anew")
    outputs, inputs = linear_shape(config, path.rpartition(".")[2])
    shape = weights.shape(names["A"])
    rank = shape[0] if len(shape) == 2 else 0
    if not 1 <= rank <= min(MOST_RANK, inputs):
        raise CheckpointError(f"{file}: {names['A']} has rank {rank}, must be 1 to {min(MOST_RANK, inputs)}")
    a = _floats(weights.array(names["A"], rank, inputs))
    b = _floats(weights.array(names["B"], outputs, rank)) * np.float32(scale(rank))
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


def _scale(terms: Mapping[str, Any], patterns: _Alphas, path: str, rank: int, file: Path) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732); alpha may differ by module."""
    alpha = next((it for pattern, it in patterns if pattern.match(path)), terms.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < abs(alpha) < 1e6:
        raise CheckpointError(
            f"{file.with_name(CONFIG)}: lora_alpha of {path} must be a number, of less than 1e6 and not 0"
        )
    return float(alpha) / (rank**0.5 if terms.get("use_rslora") else rank)


def _alphas(terms: Mapping[str, Any], file: Path) -> _Alphas:
    """Return the entries of `alpha_pattern`: each names modules by the end of their paths. Raises CheckpointError."""
    patterns = terms.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > MOST_PATTERNS:
        raise CheckpointError(f"{file}: alpha_pattern must be an object of at most {MOST_PATTERNS} entries")
    # Other expressions could take for ever.
    if not all(len(key) <= 200 and re.fullmatch(r"[\w.^$]+", key) for key in patterns):
        raise CheckpointError(f"{file}: each key of alpha_pattern must be a module's name")
    return [(re.compile(rf"(.*\.)?({key})$"), alpha) for key, alpha in patterns.items()]


def _floats(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers as stored in a checkpoint, 16-bit integers being the bits of bfloat16, in float32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
