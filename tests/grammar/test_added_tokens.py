"""Texts that must follow, for tokenizers with added tokens of every kind: what is forced is what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from outrider.core.answers.formats import FORMATS, Tools, calls_grammar
from outrider.grammar.matching import CompiledGrammar, GrammarVocabulary

TEXTS = [
    "the cat sat on the mat <tool_call> hello world </think> call tool",
    "e\u0301 caf\u00e9 \u2028 \U0001f600 {} []",
]
ADDED = (
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("</tool_call>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<left>", special=False, lstrip=True, normalized=False),
    AddedToken("<right>", special=False, rstrip=True, normalized=False),
    AddedToken("<both>", special=True, lstrip=True, rstrip=True, normalized=False),
    AddedToken("<normal>", special=False, normalized=True),
    AddedToken("    ", special=False, normalized=False),
)
PIECES = [token.content for token in ADDED] + [
    " ",
    "  ",
    "the cat",
    "x",
    "<",
    ">",
    "e\u0301",
    "\u2126",
    "\U0001f600",
    "\n",
]


def byte_level(normalizer: object | None) -> Tokenizer:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer like those of Llama 2, Mistral and Gemma."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({character for text in TEXTS for character in text.replace(" ", "\u2581") if character < "\u0080"})
    names = ["<unk>", "<|end|>", *bytes_, "\u2581", *letters, "th", "the"]
    ids = {name: number for number, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(ids, [("t", "h"), ("th", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


MADE: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: byte_level(None),
    "composed": lambda: byte_level(normalizers.NFC()),
    "byte fallback": byte_fallback,
}


@pytest.fixture(scope="module", params=MADE, ids=str)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    tokenizer = MADE[request.param]()
    tokenizer.add_tokens([token for token in ADDED if not token.special])
    tokenizer.add_special_tokens([token for token in ADDED if token.special])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return GrammarVocabulary(folder, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<|end|>")])


def said(vocabulary: GrammarVocabulary, grammar: CompiledGrammar, choice: list[int], most: int = 400) -> bytes:
    """The text of an answer that follows the grammar: `choice` says which of the tokens that may follow do."""
    walk, whole, tokens = grammar.begin(), grammar.begin(), list[int]()
    for number in range(most):
        mask = int.from_bytes(walk.mask(()), "little")
        allowed = [id_ for id_ in range(vocabulary.size) if mask >> id_ & 1]
        assert allowed, vocabulary.tokenizer.decode_bytes(tokens)
        if vocabulary.eos_ids & {*allowed}:
            whole.extend(tokens)
            assert whole.mask(()) == walk.mask(())
            return vocabulary.tokenizer.decode_bytes(tokens)
        forced = walk.forced[:1]
        token = forced[0] if forced else allowed[choice[number % len(choice)] % len(allowed)]
        assert token in allowed
        assert walk.first((), [token], 1) == [0]
        walk.extend([token])
        tokens.append(token)
    raise AssertionError(f"no end: {vocabulary.tokenizer.decode_bytes(tokens)[:200]!r}")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    kind=st.sampled_from(["lark", "choices", "two choices", "json_schema", "regex"]),
    choice=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
)
def test_what_is_forced_is_what_is_said(
    vocabulary: GrammarVocabulary, pieces: list[str], kind: str, choice: list[int]
) -> None:
    text = "".join(pieces)
    sources = {
        "lark": ("lark", f"start: {json.dumps(text, ensure_ascii=False)}"),
        "choices": ("choices", json.dumps([text])),
        "two choices": ("choices", json.dumps([text, text + "!"])),
        "json_schema": ("json_schema", json.dumps({"const": text})),
        "regex": ("regex", "".join(rf"\{it}" if it in "|()[]{}" else it for it in text)),
    }
    grammar = CompiledGrammar(vocabulary, *sources[kind], "")
    found = said(vocabulary, grammar, choice).decode()
    if kind == "json_schema":
        assert json.loads(found) == text
    else:
        assert found in (text, text + "!" if kind == "two choices" else text)


def test_forced_calls_begin_with_the_mark_of_the_model(vocabulary: GrammarVocabulary) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    tools = Tools(({"type": "function", "function": function},), required=True, single=True)
    grammar = calls_grammar(FORMATS["hermes"], tools, vocabulary.added_ids.get)
    walk = CompiledGrammar(vocabulary, grammar.kind, grammar.text, "").begin()
    assert walk.forced[0] == vocabulary.added_ids["<tool_call>"]
    assert walk.forced[-1] == vocabulary.added_ids["</tool_call>"]
