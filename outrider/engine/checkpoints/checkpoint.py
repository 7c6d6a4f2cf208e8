"""Reads checkpoints in Hugging Face format: checks the configuration, and reads weights one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from outrider.core.session.digest import tokenizer_digest
from outrider.engine.checkpoints.rope import Rope
from outrider.errors import CheckpointError
from outrider.hub import checkpoint_folder

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # bfloat16 as its bits
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ALL = slice(None)
# Names of the longest context in the configurations of model families; families without one get UNBOUNDED tokens.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "context_length")
UNBOUNDED = 8192
# Bounds far above all models; a damaged configuration may exceed them.
MOST, MOST_CONTEXT, MOST_LAYERS = 1 << 28, 1 << 24, 1 << 16
# Outrider's key in config.json: ids from this one on are padding; see `padding`.
UNPADDED = "outrider_unpadded_vocabulary"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model of the Llama family, from its config.json."""

    model_type: str
    vocabulary: int
    width: int  # of the residual stream
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # units of the feed-forward
    context: int  # longest text, in tokens
    eps: float  # of the RMS norms
    rope: Rope
    tied: bool  # whether the head is the embedding
    qkv_bias: bool
    output_bias: bool  # on the attention's output projection
    ffn_bias: bool
    head_norms: bool  # whether an RMS norm is over each head's query and key
    eos_ids: tuple[int, ...]
    unpadded_vocabulary: int  # ids from this one on are padding, which only makes the head as wide as a larger model's

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the folder must hold a checkpoint in Hugging Face format") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; download it again")
    return value


def read_tokenizer_digest(folder: Path) -> bytes:
    """Return the digest of the folder's tokenizer. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    read_json(path)
    return tokenizer_digest(path.read_bytes())


def read_tokenizer_size(folder: Path) -> int:
    """Return the number of ids of the folder's tokenizer, up to the largest one. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    try:
        return 1 + max(Tokenizer.from_file(str(path)).get_vocab().values(), default=-1)
    except Exception as error:  # tokenizers raises no more specific class
        raise CheckpointError(f"{path}: is no tokenizer ({error}); download the checkpoint again") from None


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a checkpoint. Raises CheckpointError with the file, the field and what is allowed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint in Hugging Face format")
    path = folder / "config.json"
    raw = read_json(path)

    def wrong(field: str, allowed: str) -> CheckpointError:
        return CheckpointError(f"{path}: {field} is {raw.get(field)!r}, must be {allowed}")

    def count(field: str, default: int | None = None, most: int = MOST) -> int:
        value = raw.get(field)
        if value is None and default is not None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(field, "a positive integer")
        if value > most:
            raise wrong(field, f"at most {most}")
        return value

    def flag(field: str, default: bool = False) -> bool:
        value = raw.get(field, default)
        if not isinstance(value, bool):
            raise wrong(field, "true or false")
        return value

    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise wrong("model_type", f"one of {', '.join(SUPPORTED)}: the engine runs the Llama family")
    if raw.get("quantization_config") is not None:
        raise CheckpointError(f"{path}: the weights are quantized; take a checkpoint in bfloat16, float16 or float32")
    if raw.get("hidden_act", "silu") != "silu":
        raise wrong("hidden_act", "'silu'")
    width, heads = count("hidden_size"), count("num_attention_heads")
    kv_heads = count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = count("head_dim", width // heads)
    if head_dim % 2:
        raise wrong("head_dim", "even: RoPE turns pairs")
    eps = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float | int) or not 0 <= eps < 1:
        raise wrong("rms_norm_eps", "a number from 0 to 1")
    context = count("max_position_embeddings", 2048, most=MOST_CONTEXT)
    if raw.get("sliding_window") is not None and (kind == "mistral" or flag("use_sliding_window")):
        # Up to the window's length a sliding window equals full attention.
        context = min(context, count("sliding_window"))
    biased = flag("attention_bias")
    vocabulary = count("vocab_size")
    if (unpadded_vocabulary := count(UNPADDED, vocabulary)) > vocabulary:
        raise wrong(UNPADDED, f"at most vocab_size ({vocabulary})")
    return ModelConfig(
        model_type=kind,
        vocabulary=vocabulary,
        width=width,
        layers=count("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=count("intermediate_size"),
        context=context,
        eps=float(eps),
        rope=Rope.from_config(raw, head_dim, path),
        tied=flag("tie_word_embeddings"),
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased,
        ffn_bias=flag("mlp_bias"),
        head_norms=kind == "qwen3",
        eos_ids=read_eos_ids(folder, raw),
        unpadded_vocabulary=unpadded_vocabulary,
    )


def read_eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text: those of generation_config.json, else those of the configuration."""
    path, value = folder / "config.json", config.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists() and (chosen := read_json(generation).get("eos_token_id")) is not None:
        path, value = generation, chosen
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}, must be a token id or a list of them")
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class Outline:
    """The sizes of a causal model of any family, for callers that do not load it."""

    model_type: str
    vocabulary: int
    context: int  # longest text, in tokens


def read_outline(folder: Path) -> Outline:
    """Return the sizes of a checkpoint of any family. Raises CheckpointError with file, field and what is allowed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint in Hugging Face format")
    path = folder / "config.json"
    raw = read_json(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: model_type is {kind!r}, must be a name that transformers knows")
    text = raw.get("text_config")
    fields = {**raw, **text} if isinstance(text, dict) else raw
    vocabulary = fields.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise CheckpointError(f"{path}: vocab_size is {vocabulary!r}, must be a positive integer")
    contexts = (fields.get(name) for name in CONTEXTS)
    context = next((value for value in contexts if isinstance(value, int) and value > 1), UNBOUNDED)
    return Outline(kind, vocabulary, context)


def as_tensor(stored: NDArray[Any]) -> Tensor:
    """Return the array as a tensor over the same memory; 16-bit integers are the bits of bfloat16."""
    import torch

    tensor = torch.from_numpy(stored)
    return tensor.view(torch.bfloat16) if stored.dtype == np.uint16 else tensor


class Weights:
    """The tensors of a checkpoint, in one safetensors file or several.

    Each array is a memory map that ends with the array, so that memory holds only the tensors in use.
    """

    def __init__(self, folder: Path, progress: Callable[[float], None] | None = None, *, single: str = SINGLE) -> None:
        """Read the headers of all files; calls `progress` with the fraction of bytes read. `single`: the name of the
        file where there is but one. Raises CheckpointError."""
        self._stored: dict[str, _Stored] = {}  # by tensor
        self._progress = progress
        self._taken = self._total = 0
        index = folder / INDEX
        shards = [folder / single]
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
                raise CheckpointError(f"{index}: weight_map must name the file of each tensor; download it again")
            shards = sorted({folder / name for name in listed.values()})
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(f"{shard}: missing; the weights must be there in safetensors format")
            try:
                with safe_open(str(shard), framework="np"):  # checks all of the header
                    self._stored |= _layout(shard)
            except (SafetensorError, OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"{shard}: truncated or corrupt ({error}); download it again") from None
            self._total += shard.stat().st_size
        self._index = index if index.exists() else shards[0]

    @property
    def files(self) -> dict[str, Path]:
        """The file of each tensor, by its name."""
        return {name: stored.file for name, stored in self._stored.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is one of `files`."""
        return self._stored[name].shape

    def finish(self) -> None:
        """Call `progress` with 1: the bytes that were not read are headers and unused tensors."""
        if self._progress is not None:
            self._progress(1.0)

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor as `array` does, for torch."""
        return as_tensor(self.array(name, *shape, rows=rows, columns=columns))

    def array(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[Any]:
        """Return a tensor of that shape as it is stored, bfloat16 as uint16, or only a part of it.

        Raises CheckpointError when the tensor is missing or has another shape.
        """
        array = self.check(name, *shape).map(name)[(rows, columns)[: len(shape)]]
        self._taken += math.prod(shape) * array.itemsize
        if self._progress is not None:
            self._progress(min(1.0, self._taken / self._total))
        return array

    def check(self, name: str, *shape: int) -> _Stored:
        """Return where a tensor is. Raises CheckpointError when it is missing or has another shape or type."""
        if name not in self._stored:
            raise CheckpointError(f"{self._index}: tensor {name} is missing; download the checkpoint again")
        stored = self._stored[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, config.json makes it {list(shape)}; "
                "the two files must belong together"
            )
        if stored.dtype not in STORED:
            kind = stored.dtype.lower().replace("i", "int").replace("f", "float")
            raise CheckpointError(f"{stored.file}: tensor {name} is {kind}, must be bfloat16, float16 or float32")
        return stored

    def row_bytes(self, name: str) -> tuple[str, tuple[int, ...], list[bytes]]:
        """Return the type, the shape and the bytes of the first, middle and last row of a tensor of any type.

        Type and shape are as the file names them. Raises CheckpointError.
        """
        stored = self._stored[name]
        shape = stored.shape
        rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else []
        content = stored.bytes(name)
        each = len(content) // shape[0] if rows else 0
        return stored.dtype, shape, [content[row * each : (row + 1) * each].tobytes() for row in rows]


class _Stored(NamedTuple):
    """The place of a tensor in its file."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # its bytes in the file are [start, stop)
    stop: int

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """Return a memory map of its bytes; a change does not reach the file. Raises CheckpointError."""
        try:
            if self.start == self.stop:
                return np.empty(0, np.uint8)
            return np.memmap(self.file, np.uint8, "c", self.start, (self.stop - self.start,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file}: tensor {name} cannot be read ({error}); download it again") from None

    def map(self, name: str) -> NDArray[Any]:
        """Return an array of its shape, whose type is one of those in STORED. Raises CheckpointError."""
        raw = self.bytes(name).view(np.ndarray)
        if self.start % 4:
            raw = raw.copy()  # aligns the numbers
        return raw.view(STORED[self.dtype]).reshape(self.shape)


def _layout(shard: Path) -> dict[str, _Stored]:
    """Return the tensors of a safetensors file with a checked header: 8 bytes of its length, then a JSON object."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, it in header.items():
        if name != "__metadata__":
            start, stop = (8 + length + offset for offset in it["data_offsets"])
            found[name] = _Stored(shard, it["dtype"], tuple(it["shape"]), start, stop)
    return found


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, bytes]:
    """Return a checkpoint's tokenizer and its digest. Raises CheckpointError."""
    path = checkpoint_folder(checkpoint, weights=False) / "tokenizer.json"
    try:
        content = path.read_bytes()
        return Tokenizer.from_buffer(content), tokenizer_digest(content)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give the target's checkpoint") from None
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from None
