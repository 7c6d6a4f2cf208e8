"""The metadata of GGUF files that say what a checkpoint's tokenizer and chat template are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from outrider.engine.checkpoints.checkpoint import ModelConfig, read_json
from outrider.engine.checkpoints.gguf.config import CONTROL, USER_DEFINED
from outrider.engine.checkpoints.gguf.header import read_gguf
from outrider.engine.checkpoints.gguf.pre_tokenizers import GPT2, PRE_TOKENIZERS
from outrider.errors import CheckpointError
from outrider.hub import is_gguf

_NORMAL, _UNUSED = 1, 5  # types of tokens
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_metadata(checkpoint: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the entries for a checkpoint's tokenizer: a GGUF file's own, or those of a folder.

    Raises CheckpointError for a folder whose tokenizer is not byte-level BPE.
    """
    if is_gguf(checkpoint):
        return {key: it for key, it in read_gguf(checkpoint).metadata.items() if key.startswith("tokenizer.")}
    path = checkpoint / "tokenizer.json"
    parsed = read_json(path)
    model = parsed.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or model.get("byte_fallback"):
        raise CheckpointError(f"{path}: only byte-level BPE is written as GGUF; use llama.cpp's convert_hf_to_gguf.py")
    names = {id_: name for name, id_ in vocabulary.items()}
    added = {it["id"]: it for it in parsed.get("added_tokens") or ()}
    names |= {id_: it["content"] for id_, it in added.items()}
    if (last := max(names, default=0)) >= config.vocabulary:
        raise CheckpointError(f"{path}: has token {last}, the model a vocabulary of {config.vocabulary}; take its own")
    tokens = [names.get(id_, f"[PAD{id_}]") for id_ in range(config.vocabulary)]
    kinds = np.full(config.vocabulary, _UNUSED, np.int32)
    kinds[[*names]] = _NORMAL
    for id_, it in added.items():
        kinds[id_] = CONTROL if it.get("special") else USER_DEFINED
    merges = [it if isinstance(it, str) else " ".join(it) for it in model.get("merges") or ()]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(path, parsed),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    if config.eos_ids:
        found["tokenizer.ggml.eos_token_id"] = config.eos_ids[0]
    around = Tokenizer.from_str(json.dumps(parsed)).encode("").ids
    found["tokenizer.ggml.add_bos_token"] = bool(around)
    if around:
        found["tokenizer.ggml.bos_token_id"] = around[0]
    if template := _chat_template(checkpoint):
        found[_TEMPLATE] = template
    return found


def _pre_tokenizer(path: Path, parsed: dict[str, Any]) -> str:
    """Return the name by which llama.cpp knows how texts are divided. Raises CheckpointError where it has none."""
    before = parsed.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers") or [before]
    splits = []
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": expression}}:
                splits.append(expression)
            case {"type": "Digits", "individual_digits": True}:
                splits.append(r"\p{N}")
            case {"type": "ByteLevel"}:
                splits += [GPT2] if part.get("use_regex", True) else []
    composes = (parsed.get("normalizer") or {}).get("type") == "NFC"
    for name, it in PRE_TOKENIZERS.items():
        if it.splits == tuple(splits) and it.composes == composes:
            return name
    raise CheckpointError(
        f"{path}: llama.cpp has no name for how it divides texts; use llama.cpp's convert_hf_to_gguf.py, or write the "
        "model without it and keep this tokenizer.json in a folder of the file's name beside it"
    )


def _chat_template(folder: Path) -> str | None:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None
