"""The tokenizer of a GGUF file, as the JSON of the `tokenizers` library, and what else is in its metadata of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from outrider.core.session.digest import TokenizerContent
from outrider.engine.checkpoints.gguf.config import CONTROL, NO_TOKEN, USER_DEFINED, token_names
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.errors import CheckpointError
from outrider.hub import gguf_stem

_UNKNOWN, _UNUSED = 2, 5  # types of tokens
_MERGES = "tokenizer.ggml.merges"
_LONGEST, _MOST_CHARACTERS = 1024, 1 << 22  # of tokens with scores, each of which is tried at every character
_SPACE = "▁"  # what SentencePiece writes for a space

Json = dict[str, Any]


def gguf_tokenizer_json(file: GgufFile) -> bytes:
    """Return the tokenizer as tokenizer.json has it. Raises CheckpointError for one that is not served."""
    return json.dumps(_tokenizer(file), ensure_ascii=False).encode()


def gguf_tokenizer_content(file: GgufFile) -> TokenizerContent:
    """Return what identifies the tokenizer. Raises CheckpointError."""
    merges = file.metadata.get(_MERGES)
    return TokenizerContent(_pieces(file), merges if isinstance(merges, list) else [])


def gguf_chat_template(file: GgufFile) -> tuple[str | None, dict[str, str]]:
    """Return the chat template, None if the file has none, and the special tokens by the names that templates use.

    Raises CheckpointError.
    """
    tokens = token_names(file)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator")):
        if (id_ := _id(file, key, tokens)) is not None:
            special[f"{name}_token"] = tokens[id_]
    key = "tokenizer.chat_template"
    return file.text(key) if key in file.metadata else None, special


def _tokenizer(file: GgufFile) -> Json:
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise file.wrong("tokenizer.ggml.model", f"gpt2 or llama; {_advice(file)}")
    pieces = _pieces(file)
    vocabulary = {piece: id_ for id_, piece in pieces.items()}
    if len(vocabulary) < len(pieces):
        twice = next(id_ for id_, piece in pieces.items() if vocabulary[piece] != id_)
        raise CheckpointError(
            f"{file.path}: tokens {twice} and {vocabulary[pieces[twice]]} are one text; {_advice(file)}"
        )
    special = (CONTROL, _UNKNOWN) if kind == "llama" else (CONTROL,)
    kinds = _kinds(file, len(token_names(file)))
    added = [
        {
            "id": id_,
            "content": pieces[id_],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": bool(kinds[id_] != USER_DEFINED),
        }
        for id_ in np.flatnonzero(np.isin(kinds, (*special, USER_DEFINED))).tolist()
        if pieces.get(id_)
    ]
    parts = _byte_level(file, vocabulary) if kind == "gpt2" else _sentence_piece(file, vocabulary)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Json:
    """Return the parts of a tokenizer whose pieces are bytes, as GPT-2's."""
    name = file.text("tokenizer.ggml.pre", "default")
    if (pre := PRE_TOKENIZERS.get(name)) is None:
        raise file.wrong(
            "tokenizer.ggml.pre",
            f"one of {', '.join(PRE_TOKENIZERS)}; {_advice(file)}",
        )
    merges = file.metadata.get(_MERGES)
    if not isinstance(merges, list):
        raise file.wrong(_MERGES, "an array of texts")
    pairs = [merge.split(" ") for merge in merges]
    if wrong := next((at for at, pair in enumerate(pairs) if len(pair) != 2), None):
        raise CheckpointError(f"{file.path}: merge {wrong} is not of two tokens; convert the model anew")
    return {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_split, pre.splits), _BYTES]},
        "post_processor": _around(file, bos=pre.adds_bos),
        "decoder": _BYTES | {"add_prefix_space": True, "use_regex": True},
        "model": _merging(vocabulary, pairs, ignore_merges=pre.ignores_merges),
    }


def _sentence_piece(file: GgufFile, vocabulary: dict[str, int]) -> Json:
    """Return the parts of a tokenizer whose pieces have scores, and bytes for what is in none."""
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = _id(file, "unknown", names := token_names(file))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    start = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    first = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "post_processor": _around(file, bos=True),
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *start]},
        "model": _merging(
            vocabulary,
            _merges(file, vocabulary, _scores(file, len(names))),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else names[unknown],
        ),
    }


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _split(expression: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _merging(vocabulary: dict[str, int], merges: Sequence[Sequence[str]], **options: Any) -> Json:
    empty = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    plain = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **empty, **plain, **options, "vocab": vocabulary, "merges": merges}


def _merges(file: GgufFile, vocabulary: dict[str, int], scores: Any) -> list[tuple[str, str]]:
    """Return the merges that make the pieces: those into a piece of a higher score come first."""
    longest, characters = max(map(len, vocabulary)), sum(map(len, vocabulary))
    if longest > _LONGEST or characters > _MOST_CHARACTERS:
        raise CheckpointError(
            f"{file.path}: its tokens have up to {longest} characters, and {characters} in all; may have {_LONGEST} "
            f"and {_MOST_CHARACTERS}; {_advice(file)}"
        )
    found: list[tuple[float, int, int, str, str]] = []
    for piece, id_ in vocabulary.items():
        score = -scores[id_]
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocabulary and right in vocabulary:
                found.append((score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _around(file: GgufFile, *, bos: bool) -> Json | None:
    """Return what puts tokens around a text. `bos`: whether its first one does where the file does not say it."""
    tokens = token_names(file)
    around = {}
    for name, usual in (("bos", bos), ("eos", False)):
        if file.flag(f"tokenizer.ggml.add_{name}_token", usual):
            if (id_ := _id(file, name, tokens)) is None:
                raise file.wrong(f"tokenizer.ggml.{name}_token_id", f"a token's, as add_{name}_token asks for it")
            around[name] = id_
    if not around:
        return None
    names = {name: tokens[id_] for name, id_ in around.items()}
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    for name, token in names.items():
        special = {"SpecialToken": {"id": token, "type_id": 0}}
        single, pair = ([special, *it] if name == "bos" else [*it, special] for it in (single, pair))
    ids = {token: {"id": token, "ids": [around[name]], "tokens": [token]} for name, token in names.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ids}


def _pieces(file: GgufFile) -> dict[int, str]:
    """Return the tokens by id, without those that a converter puts behind them for the embedding's sake."""
    tokens = token_names(file)
    if not tokens:
        raise CheckpointError(f"{file.path}: has no tokenizer; {_advice(file)}")
    kinds = _kinds(file, len(tokens))
    padding = {id_ for id_ in np.flatnonzero(kinds == _UNUSED).tolist() if tokens[id_] == f"[PAD{id_}]"}
    return {id_: token for id_, token in enumerate(tokens) if id_ not in padding}


def _advice(file: GgufFile) -> str:
    return f"put the model's own tokenizer.json into a folder {gguf_stem(file.path)} beside the file"


def _kinds(file: GgufFile, count: int) -> Any:
    return _numbers(file, "tokenizer.ggml.token_type", count, "iu")


def _scores(file: GgufFile, count: int) -> Any:
    return _numbers(file, "tokenizer.ggml.scores", count, "f").tolist()


def _numbers(file: GgufFile, key: str, count: int, kinds: Literal["iu", "f"]) -> Any:
    """Return an array with a number for each token. Raises CheckpointError."""
    if key not in file.metadata and kinds == "iu":
        return np.ones(count, np.int32)
    values = file.metadata.get(key)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != count:
        raise file.wrong(key, f"an array of {count} numbers, one for each token")
    return values


def _id(file: GgufFile, name: str, tokens: Sequence[str]) -> int | None:
    """Return the id of a special token; None if there is none. Raises CheckpointError."""
    value = file.single(key := f"tokenizer.ggml.{name}_token_id")
    if value is None or value == NO_TOKEN:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
        raise file.wrong(key, "the id of a token")
    return value
