"""Tokenizers of GGUF files divide texts as llama.cpp does and have the digests of their folders, or are refused."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.core.session.digest import TokenizerContent, tokenizer_digest
from outrider.engine.checkpoints.checkpoint import (
    read_tokenizer,
    read_tokenizer_digest,
    read_tokenizer_size,
    tokenizer_difference,
    tokenizer_source,
)
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.engine.checkpoints.gguf.tokenizer import gguf_chat_template, gguf_tokenizer_json
from outrider.errors import CheckpointError
from router.requests.chat_template import read_chat_template
from tests.engine.gguf.nasty_texts import TEXTS, greedy_vocabulary
from tests.engine.gguf.small_files import CONTROL, NORMAL, USER_DEFINED, Typed, text, write

# SHA-256 of the ids, in JSON, that llama.cpp (llama-cpp-python 0.3.36) makes of TEXTS with `greedy_vocabulary`.
LLAMA_CPP = {
    "deepseek-coder": "b1c0d445269fe4bd",
    "deepseek-v3": "1d53ea4fc92cea0f",
    "default": "88f36cf2d5d9195f",
    "gpt-2": "de5b002f96c913ae",
    "gpt-4o": "1ff2dddfc6775424",
    "llama-bpe": "3ee4a8bf01b2c8af",
    "qwen2": "ffe88b762e255bbe",
    "qwen35": "95e99013eb1d1ccb",
    "smaug-bpe": "5387903ee427f9c1",
    "smollm": "5c9f7baacbdedfbb",
    "stablelm2": "ffe88b762e255bbe",
    "tekken": "827d73a413cce4ec",
}


def array(kind: int, code: str, values: Sequence[Any]) -> Typed:
    return Typed(9, struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values))


def texts(values: Sequence[str]) -> Typed:
    return Typed(9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values)))


def vocabulary(tokens: Sequence[str], model: str | None = "gpt2", **more: Any) -> dict[str, Any]:
    """Metadata; types of tokens by id in `types`, the others are normal."""
    types = more.pop("types", {})
    found = {
        "model": model,
        "tokens": texts(tokens),
        "token_type": array(5, "i", [types.get(id_, NORMAL) for id_ in range(len(tokens))]),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def made(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_buffer(gguf_tokenizer_json(GgufFile(write(path, metadata))))


def divided_alike(pre: str, one: str) -> bool:
    """Return whether llama.cpp follows the models' own expression: it has none for cases beyond ASCII's."""
    return one.isascii() if pre in ("tekken", "gpt-4o") else not (pre == "deepseek-coder" and "\u3000" in one)


@pytest.mark.parametrize("pre", LLAMA_CPP)
def test_texts_are_divided_as_llama_cpp_divides_them(tmp_path: Path, pre: str) -> None:
    tokens, merges = greedy_vocabulary()
    found = made(
        tmp_path / "a.gguf", vocabulary(tokens, pre=pre, merges=texts(merges), add_bos_token=False, bos_token_id=0)
    )
    ids = [found.encode(one).ids for one in TEXTS if divided_alike(pre, one)]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == LLAMA_CPP[pre]
    for one in TEXTS:
        assert found.decode(found.encode(one).ids) == one


def test_every_pre_tokenizer_is_compared() -> None:
    assert {PRE_TOKENIZERS[name] for name in LLAMA_CPP} == {*PRE_TOKENIZERS.values()}


BYTES = [chr(256 + number) if number < 33 else chr(number) for number in range(127)]
SMALL = [*BYTES, "<s>", "</s>", "<tool>", "ab", "[PAD131]"]
TYPES = {127: CONTROL, 128: CONTROL, 129: USER_DEFINED, 131: 5}


def small(**changes: Any) -> dict[str, Any]:
    settings = {
        "model": "gpt2",
        "pre": "gpt-2",
        "merges": texts(["a b"]),
        "bos_token_id": 127,
        "eos_token_id": 128,
        "types": TYPES,
    }
    return vocabulary(changes.pop("tokens", SMALL), **settings | changes)


def test_special_tokens(tmp_path: Path) -> None:
    found = made(tmp_path / "a.gguf", small(add_bos_token=True, add_eos_token=True))
    encoded = found.encode("ab<tool><s>")
    assert encoded.tokens == ["<s>", "ab", "<tool>", "<s>", "</s>"]
    assert found.decode(encoded.ids) == "ab<tool>"
    assert found.encode("a", "b").tokens == ["<s>", "a", "b", "</s>"]
    assert found.get_vocab_size() == 131  # without the padding
    assert made(tmp_path / "a.gguf", small()).encode("ab").tokens == ["ab"]
    assert made(tmp_path / "a.gguf", small(pre="llama-bpe")).encode("ab").tokens == ["<s>", "ab"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"pre": "jais-2"},
            "tokenizer.ggml.pre is 'jais-2', must be one of llama-bpe, .*; put the model's own",
        ),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', must be gpt2 or llama; put the model's own"),
        ({"model": None}, "metadata lack tokenizer.ggml.model"),
        ({"merges": None}, "metadata lack tokenizer.ggml.merges, which must be an array of texts"),
        ({"merges": texts(["a b", "abc"])}, "merge 1 is not of two tokens; convert the model anew"),
        ({"merges": texts(["a zz"])}, "a.gguf: is not a tokenizer"),
        ({"token_type": array(5, "i", [1, 1])}, "token_type is an array of 2, must be an array of 132 numbers"),
        ({"token_type": texts(["x"] * 132)}, "token_type is an array of 132, must be an array of 132 numbers"),
        ({"tokens": [*SMALL, "ab"]}, "tokens 130 and 132 are one text; put the model's own tokenizer.json into"),
        ({"add_bos_token": True, "bos_token_id": None}, "lack tokenizer.ggml.bos_token_id, which must be a token's"),
        ({"add_bos_token": True, "bos_token_id": 999}, "bos_token_id is 999, must be the id of a token"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, must be true or false"),
        ({"tokens": []}, "has no tokenizer; put the model's own tokenizer.json into a folder a beside the file"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    file = write(tmp_path / "a.gguf", small(**changes))
    with pytest.raises(CheckpointError, match=error) as refused:
        read_tokenizer(file)
    assert str(refused.value).startswith(f"{file}: ")


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab", "  "]
SCORES = [0.0] * 259 + [-9.0, -7.0, -8.0, -2.0, -1.0, -3.0, 0.0]


def pieces(**changes: Any) -> dict[str, Any]:
    types = {0: 2, 1: CONTROL, 2: CONTROL, **dict.fromkeys(range(3, 259), 6), 265: USER_DEFINED}
    settings = {"scores": array(6, "f", SCORES), "types": types, "bos_token_id": 1, "unknown_token_id": 0}
    return vocabulary(PIECES, "llama", **settings | changes)


def test_sentence_pieces(tmp_path: Path) -> None:
    found = made(tmp_path / "a.gguf", pieces())
    assert found.encode("ab a").tokens == ["<s>", "▁ab", "▁a"]  # ▁a has a lower score than ab
    assert found.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert found.encode("a</s>  b").tokens == ["<s>", "▁a", "</s>", "  ", "▁", "b"]
    for one in ("ab a", "é", "你 🙂"):
        assert found.decode(found.encode(one).ids) == one
    bare = made(tmp_path / "a.gguf", pieces(add_space_prefix=False, add_bos_token=False))
    assert bare.encode("ab a").tokens == ["ab", "▁a"]
    assert bare.decode(bare.encode(" ab").ids) == " ab"
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.scores is an array of 2, must be an array of 266"):
        made(tmp_path / "a.gguf", pieces(scores=[0.5, 0.5]))


def merged_by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """The tokens of a text as SentencePiece defines them: of all neighbours those are joined first whose sum scores
    highest, and of equal ones the first."""
    parts = [*text]
    while True:
        sums = [(scores[one + other], -at) for at, (one, other) in enumerate(pairwise(parts)) if one + other in scores]
        if not sums:
            return parts
        at = -max(sums)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.text("ab▁", min_size=2, max_size=5), max_size=25, unique=True),
    order=st.randoms(use_true_random=False),
    one=st.text("ab ", max_size=24),
)
def test_merges_of_scores_are_those_of_sentence_piece(tmp_path: Path, words: list[str], order: Any, one: str) -> None:
    tokens = ["<unk>", "a", "b", "▁", *words]
    ranks = [*range(len(tokens))]
    order.shuffle(ranks)
    scores = dict(zip(tokens, map(float, ranks), strict=True))
    metadata = vocabulary(
        tokens,
        "llama",
        types={0: 2},
        scores=array(6, "f", [scores[token] for token in tokens]),
        unknown_token_id=0,
        add_bos_token=False,
        add_space_prefix=False,
    )
    found = made(tmp_path / "a.gguf", metadata)
    assert found.encode(one).tokens == merged_by_scores(one.replace(" ", "▁"), scores)


@pytest.mark.parametrize("long", [["a" * 1025], [f"{number:06}" + "a" * 1000 for number in range(4200)]])
def test_tokens_that_would_take_long_to_divide(tmp_path: Path, long: list[str]) -> None:
    tokens = [*PIECES, *long]
    scores = array(6, "f", [0.0] * len(tokens))
    file = write(tmp_path / "a.gguf", pieces() | vocabulary(tokens, "llama", scores=scores))
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"its tokens have up to 10.. characters, and .* in all; may have 1024 "):
        read_tokenizer(file)
    assert time.process_time() - began < 1


def test_the_digest_is_that_of_the_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", small())
    folder = tmp_path / "folder"
    folder.mkdir()
    tokenizer, digest = read_tokenizer(file)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert read_tokenizer_digest(file) == digest == read_tokenizer_digest(folder) == read_tokenizer(folder)[1]
    assert tokenizer_difference(file, folder) == ""
    assert read_tokenizer_size(file) == read_tokenizer_size(folder) == 131
    assert tokenizer_source(folder) == folder
    source = tokenizer_source(file)
    assert not isinstance(source, Path)
    assert tokenizer_digest(source()) == digest
    other = write(tmp_path / "b.gguf", small(tokens=[*SMALL[:130], "ba", "[PAD131]"]))
    assert read_tokenizer_digest(other) != digest
    assert tokenizer_difference(folder, other) == "id 130 is 'ab' and 'ba'"
    merged = write(tmp_path / "d.gguf", small(merges=texts(["a b", "b a"])))
    assert read_tokenizer_digest(merged) != digest
    assert tokenizer_difference(file, merged) == "merge 1 is None and 'b a'"
    fewer = write(tmp_path / "c.gguf", small(tokens=SMALL[:130], types={}))
    assert tokenizer_difference(fewer, file) == "id 130 is 'ab' in the second alone"
    assert tokenizer_difference(file, fewer) == "id 130 is 'ab' in the first alone"


def test_a_folder_beside_the_file_has_its_tokenizer(tmp_path: Path) -> None:
    file = write(tmp_path / "a.Q8_0.gguf", small(pre="jais-2") | {"tokenizer.chat_template": "{{ 1 }}"})
    folder = tmp_path / "a.Q8_0"
    folder.mkdir()
    made(tmp_path / "b.gguf", small()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ 2 }}"}')
    assert read_tokenizer(file)[0].encode("ab").tokens == ["ab"]
    assert read_tokenizer_digest(file) == read_tokenizer_digest(folder)
    assert tokenizer_difference(file, folder) == ""
    assert tokenizer_source(file) == folder
    template = read_chat_template(file)
    assert template is not None
    template.close()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"put the model's own tokenizer\.json into a folder a\.Q8_0 beside the"):
        read_tokenizer(file)


def test_spaces_are_written_in_two_ways() -> None:
    assert TokenizerContent({0: "▁a"}, []).difference(TokenizerContent({0: " a"}, [])) == ""
    written = {"model": {"vocab": {"▁a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "▁▁"}]}
    other = {"model": {"vocab": [["▁a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 2, "content": "  "}]}
    assert tokenizer_digest(json.dumps(written).encode()) == tokenizer_digest(json.dumps(other).encode())
    moved = {"model": {"vocab": {"b": 0, "▁a": 1}}, "added_tokens": written["added_tokens"]}
    assert tokenizer_digest(json.dumps(written).encode()) != tokenizer_digest(json.dumps(moved).encode())


@pytest.mark.parametrize("broken", [{"model": {"vocab": {"a": "x"}}}, {"model": {"vocab": [1]}}, {"model": []}, [], 7])
def test_json_without_a_vocabulary_has_a_digest_too(broken: Any) -> None:
    canonical = json.dumps(broken, separators=(",", ":")).encode()
    assert tokenizer_digest(json.dumps(broken, indent=2).encode()) == hashlib.sha256(canonical).digest()[:16]


def test_the_chat_template(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": "{{ bos_token }}"}
    found = gguf_chat_template(GgufFile(write(tmp_path / "a.gguf", small() | template)))
    assert found == ("{{ bos_token }}", {"bos_token": "<s>", "eos_token": "</s>"})
    assert gguf_chat_template(GgufFile(write(tmp_path / "a.gguf", small())))[0] is None
    with pytest.raises(CheckpointError, match=r"metadata tokenizer.chat_template is 7, must be a text"):
        gguf_chat_template(GgufFile(write(tmp_path / "a.gguf", small() | {"tokenizer.chat_template": 7})))
