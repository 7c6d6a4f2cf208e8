"""Reads checkpoints in Hugging Face format: checks the configuration, and reads weights one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.core.session.digest import (
    former_tokenizer_digest,
    parsed_tokenizer_digest,
    tokenizer_content,
    tokenizer_digest,
)
from outrider.engine.checkpoints.families import BY_ARCHITECTURE, BY_MODEL_TYPE
from outrider.engine.checkpoints.families.family import Family
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.files import CheckpointFile, ReadFile, read_file
from outrider.engine.checkpoints.gguf.config import gguf_config, gguf_eos_ids, gguf_outline
from outrider.engine.checkpoints.gguf.header import read_gguf
from outrider.engine.checkpoints.gguf.tensors import gguf_tensors
from outrider.engine.checkpoints.gguf.tokenizer import (
    gguf_chat_template,
    gguf_tokenizer_content,
    gguf_tokenizer_json,
)
from outrider.engine.checkpoints.model_config import (
    DRAFT_IDS,
    MOST_CONTEXT,
    MOST_LAYERS,
    UNBOUNDED,
    check_draft_ids,
)
from outrider.engine.checkpoints.model_config import ModelConfig as ModelConfig
from outrider.engine.checkpoints.model_config import Outline as Outline
from outrider.engine.checkpoints.quantized.method import KEY, read_method
from outrider.engine.checkpoints.quantized.tensors import with_quantized
from outrider.engine.checkpoints.rope import LongScaling, Rope
from outrider.engine.checkpoints.stored_tensors import StoredTensor, StoredTensors, safetensors_layout
from outrider.errors import CheckpointError
from outrider.hub import TOKENIZER, checkpoint_folder, is_gguf, tokenizer_folder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files that checkpoints have beside weights and configuration.
BESIDE = (
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Names of the longest context in the configurations of model families; families without one get UNBOUNDED tokens.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "context_length")
MOST_JSON = 256 << 20  # bytes of a file in JSON; tokenizers have 40 MB at most
# Fields of a model of texts and images that count for its text model, and how that one's tensors are named.
_OF_BOTH = ("tie_word_embeddings", "eos_token_id", "quantization_config")
_WITHIN = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head": "lm_head"}
# Outrider's key in config.json: ids from this one on are padding; see `padding`.
UNPADDED = "outrider_unpadded_vocabulary"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises CheckpointError."""
    return parse_json(read_file(path, MOST_JSON))


def parse_json(file: ReadFile) -> dict[str, Any]:
    """Return the JSON object of a file that has been read. Raises CheckpointError, which quotes nothing of it."""
    try:
        value = json.loads(file.content.tobytes())
    except (ValueError, RecursionError) as error:
        where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointError(f"{file.path}: not valid JSON{where}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.path}: must hold a JSON object; download it again")
    return value


def read_tokenizer_digest(checkpoint: Path) -> bytes:
    """Return the digest of a checkpoint's tokenizer. Raises CheckpointError."""
    if is_gguf(place := tokenizer_folder(checkpoint)):
        return gguf_tokenizer_content(read_gguf(place)).digest
    return parsed_tokenizer_digest(read_json(place / TOKENIZER))


def read_tokenizer_digests(checkpoint: Path) -> tuple[bytes, ...]:
    """Return all digests by which a checkpoint's tokenizer has been known, today's first. Raises CheckpointError."""
    if is_gguf(place := tokenizer_folder(checkpoint)):
        return (read_tokenizer_digest(place),)
    parsed = read_json(place / TOKENIZER)
    return parsed_tokenizer_digest(parsed), former_tokenizer_digest(parsed)


def tokenizer_difference(first: Path, second: Path) -> str:
    """Return what differs between the tokenizers of two checkpoints, for people; "": nothing, or one has no vocabulary.

    Raises CheckpointError.
    """
    ours, theirs = (
        gguf_tokenizer_content(read_gguf(path)) if is_gguf(path) else tokenizer_content(read_json(path / TOKENIZER))
        for path in map(tokenizer_folder, (first, second))
    )
    return "" if ours is None or theirs is None else ours.difference(theirs)


def read_tokenizer_size(checkpoint: Path) -> int:
    """Return the number of ids of a checkpoint's tokenizer, up to the largest one. Raises CheckpointError."""
    return 1 + max(read_tokenizer(checkpoint)[0].get_vocab().values(), default=-1)


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a text model; that of a model of texts and images has it within."""
    text = raw.get("text_config")
    if str(raw.get("model_type")) in BY_MODEL_TYPE or not isinstance(text, dict):
        return raw
    return {**{name: raw[name] for name in _OF_BOTH if name in raw}, **text}


def family_of(checkpoint: Path) -> Family | None:
    """Return the family of a checkpoint; None for one that the engine does not run. Raises CheckpointError."""
    if is_gguf(checkpoint):
        return BY_ARCHITECTURE.get(read_gguf(checkpoint).text("general.architecture"))
    return _family(read_json(checkpoint / "config.json"))


def _family(raw: dict[str, Any]) -> Family | None:
    """Return the family of a config.json."""
    return BY_MODEL_TYPE.get(str(text_fields(raw).get("model_type")))


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a checkpoint. Raises CheckpointError with the file, the field and what is allowed."""
    if is_gguf(folder):
        return gguf_config(read_gguf(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint in Hugging Face format")
    path = folder / "config.json"
    raw = text_fields(read_json(path))

    fields = ConfigFields(path, raw)
    wrong, count, flag = fields.wrong, fields.count, fields.flag
    kind = raw.get("model_type")
    family = BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise wrong("model_type", f"one of {', '.join(BY_MODEL_TYPE)}: the engine runs these families")
    read_method(raw, path)
    if "hidden_activation" not in raw:
        fields.only("hidden_act", "silu")
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
    biased = flag("attention_bias")
    vocabulary = count("vocab_size")
    if (unpadded_vocabulary := count(UNPADDED, vocabulary)) > vocabulary:
        raise wrong(UNPADDED, f"at most vocab_size ({vocabulary})")
    tied, draft_ids = flag("tie_word_embeddings", family.tied), tuple[int, ...]()
    if DRAFT_IDS in raw:
        try:
            draft_ids = check_draft_ids(raw[DRAFT_IDS], unpadded_vocabulary, tied=tied)
        except ValueError as error:
            raise wrong(DRAFT_IDS, str(error)) from None
    config = ModelConfig(
        model_type=str(kind),
        vocabulary=vocabulary,
        width=width,
        layers=count("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=count("intermediate_size", raw.get("moe_intermediate_size") if family.mixture else None),
        context=context,
        eps=float(eps),
        rope=Rope.from_config(raw, path, family.theta),
        tied=tied,
        qkv_bias=biased,
        output_bias=biased,
        ffn_bias=flag("mlp_bias"),
        head_norms=False,
        eos_ids=read_eos_ids(folder),
        unpadded_vocabulary=unpadded_vocabulary,
        draft_ids=draft_ids,
    )
    config = replace(config, **family.describe(fields, config))
    _check_turned(config, raw, path)
    return config


def _check_turned(config: ModelConfig, raw: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError where RoPE turns only a part of each head and the family is not known for it."""
    ropes = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    share = ropes.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1.0) and not config.parts.turned:
        raise CheckpointError(f"{path}: partial_rotary_factor is {share!r:.80}, must be 1 for {config.model_type}")
    if config.turned % 2:
        raise CheckpointError(f"{path}: partial_rotary_factor is {share!r:.80}: RoPE turns pairs")
    if isinstance(config.rope.scaling, LongScaling) and len(config.rope.scaling.divisors) != config.turned // 2:
        raise CheckpointError(f"{path}: short_factor must have {config.turned // 2} numbers")


def has_blocks(checkpoint: Path) -> bool:
    """Return whether weights of a checkpoint are quantized, in GGUF or a format of the hub. Raises CheckpointError."""
    return is_gguf(checkpoint) or read_json(checkpoint / "config.json").get(KEY) is not None


def config_json(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json, or what stands for that of a GGUF file. Raises CheckpointError."""
    return read_config(checkpoint).to_json() if is_gguf(checkpoint) else read_json(checkpoint / "config.json")


def copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's tokenizer and chat template into a folder. Raises CheckpointError, OSError."""
    place = tokenizer_folder(checkpoint)
    if not is_gguf(place):
        for name in BESIDE:
            if (place / name).exists():
                shutil.copyfile(place / name, folder / name)
        return
    file = read_gguf(place)
    (folder / TOKENIZER).write_bytes(gguf_tokenizer_json(file))
    template, special = gguf_chat_template(file)
    settings = special | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text: those of generation_config.json, else those of the configuration."""
    if is_gguf(folder):
        return gguf_eos_ids(read_gguf(folder))
    path = folder / "config.json"
    value = text_fields(read_json(path)).get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists() and (chosen := read_json(generation).get("eos_token_id")) is not None:
        path, value = generation, chosen
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r:.80}, must be a token id or a list of them")
    return tuple(ids)


def read_outline(folder: Path) -> Outline:
    """Return the sizes of a checkpoint of any family. Raises CheckpointError with file, field and what is allowed."""
    if is_gguf(folder):
        return gguf_outline(read_gguf(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint in Hugging Face format")
    path = folder / "config.json"
    raw = read_json(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: model_type is {kind!r:.80}, must be a name that transformers knows")
    text = raw.get("text_config")
    fields = {**raw, **text} if isinstance(text, dict) else raw
    vocabulary = fields.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise CheckpointError(f"{path}: vocab_size is {vocabulary!r:.80}, must be a positive integer")
    contexts = (fields.get(name) for name in CONTEXTS)
    context = next((value for value in contexts if isinstance(value, int) and value > 1), UNBOUNDED)
    return Outline(kind, vocabulary, context)


class Weights(StoredTensors):
    """The tensors of a checkpoint, in one safetensors file or several, or in GGUF."""

    def __init__(self, checkpoint: Path, progress: Callable[[float], None] | None = None) -> None:
        """Read the headers of all files; see `StoredTensors`. Raises CheckpointError."""
        if is_gguf(checkpoint):
            super().__init__(gguf_tensors(read_gguf(checkpoint)), checkpoint, progress, "its metadata")
            return
        index = checkpoint / INDEX
        shards = [checkpoint / SINGLE]
        if has_index := index.exists():
            listed = read_json(index).get("weight_map")
            names = [*map(str, listed.values())] if isinstance(listed, dict) else [""]
            if not all(name and name == Path(name).name for name in names):
                raise CheckpointError(
                    f"{index}: weight_map must name the file of each tensor, in its own folder; download it again"
                )
            shards = sorted({checkpoint / name for name in names})
        layout = safetensors_layout([CheckpointFile(shard) for shard in shards])
        config = checkpoint / "config.json"
        raw = read_json(config) if config.exists() else {}
        named = _renamed(layout, _family(raw))
        method = read_method(raw, config) if raw else None
        super().__init__(
            with_quantized(named, method) if method else named, index if has_index else shards[0], progress
        )


def _renamed(layout: Mapping[str, StoredTensor], family: Family | None) -> dict[str, StoredTensor]:
    """Return the tensors under the names that they have here."""
    renamed = _WITHIN if family is None else {**_WITHIN, **family.renamed}

    def name(there: str) -> str:
        for part, here in renamed.items():
            there = there.replace(part, here)
        return there

    return {name(there): source for there, source in layout.items()}


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, bytes]:
    """Return a checkpoint's tokenizer and its digest. Raises CheckpointError."""
    path = tokenizer_folder(checkpoint_folder(checkpoint, weights=False))
    try:
        if is_gguf(path):
            file = read_gguf(path)
            return Tokenizer.from_buffer(gguf_tokenizer_json(file)), gguf_tokenizer_content(file).digest
        path /= TOKENIZER
        content = read_file(path, MOST_JSON).content.tobytes()
        return Tokenizer.from_buffer(content), tokenizer_digest(content)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path}: is not a tokenizer ({error}); download the checkpoint again") from None


def tokenizer_source(checkpoint: Path) -> Path | Callable[[], bytes]:
    """Return the folder that has a checkpoint's tokenizer.json, or what makes its content of a GGUF file."""
    place = tokenizer_folder(checkpoint)
    return (lambda: gguf_tokenizer_json(read_gguf(place))) if is_gguf(place) else place
