"""What a grammar does to a sampler's choice, and what a compiler makes of what callers send."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import MAX_GRAMMAR, Contract, Grammar
from outrider.errors import CheckpointError, ConfigError, InvalidRequest
from outrider.grammar.compiler import GrammarCompiler

FOLDER = Path(__file__).parents[2] / "models" / "target"
VOCABULARY, EOS = 4096, 4095  # not the first, which numpy takes where all are equal
END_OF_TEXT = 0  # the tokenizer's own
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, VOCABULARY, [EOS])


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def generated(
    compiler: GrammarCompiler, grammar: Grammar, seed: int, most: int = 200, compiled: bool = True, **terms: object
) -> tuple[list[int], bool]:
    """A text from logits that know nothing, and whether it ended by itself."""
    contract = Contract(seed=seed, max_tokens=most, stop_ids=(EOS,), grammar=grammar, **terms)  # type: ignore[arg-type]
    sampler = Sampler(contract, VOCABULARY, [5, 6], 2, grammar=compiler.start(grammar), compiled=compiled)
    random, tokens = np.random.default_rng(seed), []
    for _ in range(most):
        token = sampler.choose(random.standard_normal(VOCABULARY).astype(np.float32)).token
        if token == EOS:
            return tokens, True
        tokens.append(token)
        sampler.extend([token])
    return tokens, False


def test_a_drafter_with_further_ids_than_the_target_chooses_as_one_without(compiler: GrammarCompiler) -> None:
    """Its grammars are of its own ids, its choices of those that both have."""
    padded, grammar = GrammarCompiler(FOLDER, VOCABULARY + 128, [EOS]), Grammar("json_schema", PERSON)
    for compiled in (True, False):
        expected = generated(compiler, grammar, 3, compiled=compiled)
        assert generated(padded, grammar, 3, compiled=compiled) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_follows_its_grammar_to_the_end(compiler: GrammarCompiler, seed: int, temperature: float) -> None:
    tokens, ended = generated(compiler, Grammar("json_schema", PERSON), seed, temperature=temperature, top_p=0.9)
    if ended:
        person = json.loads(TOKENIZER.decode(tokens))
        assert person.keys() == {"name", "age"}
        assert isinstance(person["age"], int)
    for grammar, allowed in (
        (Grammar("choices", '["yes", "no", "perhaps"]'), ("yes", "no", "perhaps")),
        (Grammar("regex", "(red|green) [0-9]{2}"), None),
        (Grammar("lark", 'start: "a" ("b" | "c")~2'), ("abb", "abc", "acb", "acc")),
    ):
        tokens, ended = generated(compiler, grammar, seed, temperature=temperature)
        text = TOKENIZER.decode(tokens)
        assert ended
        assert text in allowed if allowed else text[:-3] in ("red", "green")


@pytest.mark.parametrize(
    ("reasoning", "text", "fits"),
    [
        ("opened", "hm {x} </thin\n</think>\n\n42", True),
        ("opened", "42", False),
        ("opened", "</think>42", True),
        ("marked", "<think>\nhm</think>42", True),
        ("marked", "42", True),
        ("marked", "hm</think>42", False),
        ("", "</think>42", False),
    ],
)
@pytest.mark.parametrize(
    ("kind", "of"),
    [("regex", "[0-9]{2}"), ("json_schema", '{"const": 42}'), ("choices", '["42"]'), ("lark", 'start: "42"')],
)
def test_reasoning_comes_before_the_text(kind: str, of: str, reasoning: str, text: str, fits: bool) -> None:
    compiler = GrammarCompiler(FOLDER, VOCABULARY, [END_OF_TEXT])
    state, tokens = compiler.start(Grammar(kind, of, reasoning)), [*ids(text), END_OF_TEXT]
    assert all(state.allowed(tokens[:at])[tokens[at]] for at in range(len(tokens))) is fits


def test_marks_of_reasoning_may_be_special_tokens(tmp_path: Path) -> None:
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for id_, text in ((VOCABULARY, "<think>"), (VOCABULARY + 1, "</think>")):
        tokenizer["added_tokens"].append({"id": id_, "content": text, **common})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    marked = GrammarCompiler(tmp_path, VOCABULARY + 2, [END_OF_TEXT]).start(Grammar("regex", "[0-9]{2}", "marked"))
    thought, answer = [VOCABULARY, *ids("hm </think>")], [VOCABULARY + 1, *ids("42"), END_OF_TEXT]
    assert all(marked.allowed((thought + answer)[:at])[token] for at, token in enumerate(thought + answer))
    assert marked.allowed(thought)[ids("hm")[0]]  # the mark's text is no mark
    assert not marked.allowed([*thought, answer[0]])[ids("hm")[0]]


def test_a_tokenizer_may_be_made_when_it_is_needed() -> None:
    made: list[bytes] = []

    def content() -> bytes:
        made.append((FOLDER / "tokenizer.json").read_bytes())
        return made[-1]

    compiler = GrammarCompiler(content, VOCABULARY, [END_OF_TEXT])
    assert not made
    state = compiler.start(Grammar("regex", "42"))
    assert state.allowed([])[ids("42")[0]]
    compiler.start(Grammar("regex", "43")).allowed([])
    assert len(made) == 1


def test_a_tokenizer_that_cannot_be_made_is_no_tokenizer() -> None:
    def content() -> bytes:
        raise CheckpointError("a.gguf: is none")

    with pytest.raises(ConfigError, match="does not work with this model's tokenizer"):
        GrammarCompiler(content, VOCABULARY, [END_OF_TEXT]).start(Grammar("regex", "42")).allowed([])


@pytest.mark.parametrize("seed", range(4))
def test_numpy_and_compiled_code_choose_equal_tokens(compiler: GrammarCompiler, seed: int) -> None:
    grammar = Grammar("json_schema", PERSON)
    terms = {"repetition_penalty": 1.2, "logit_bias": {91: 3.0}, "min_p": 0.02}
    one, other = (generated(compiler, grammar, seed, 60, compiled, **terms) for compiled in (True, False))
    assert one == other


@pytest.mark.parametrize(
    "terms", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"logit_bias": {91: 9.0}, "min_tokens": 3}]
)
def test_a_choice_among_the_best_is_that_of_the_mask(compiler: GrammarCompiler, terms: dict[str, Any]) -> None:
    grammar, text = Grammar("json_schema", PERSON), ids('{"name": "bob", "age": 12}')
    chance = np.random.default_rng(5)
    for place in range(len(text) + 1):
        contract = Contract(seed=place, max_tokens=99, stop_ids=(EOS,), grammar=grammar, **terms)
        sampler = Sampler(contract, VOCABULARY, [5, 6], 2, grammar=compiler.start(grammar, text[:place]))
        masked = compiler.start(grammar, text[:place]).allowed(())
        logits = chance.normal(0.0, 1.0, VOCABULARY).astype(np.float32)
        logits[chance.choice(np.flatnonzero(masked), 3)] += 8.0  # the model follows the grammar, with others beside
        logits[chance.integers(0, VOCABULARY, 3)] += 8.0
        choice = sampler.choose(logits)
        tokens, scores = sampler.leading(logits, (), 2)
        gap = scores[0] - scores[1] if len(tokens) > 1 else np.inf
        assert (choice.token, choice.gap) == (tokens[0], pytest.approx(gap, abs=1e-9))


def test_a_single_token_is_checked_without_a_mask(compiler: GrammarCompiler) -> None:
    grammar, text = Grammar("json_schema", PERSON), ids('{"name": "bob", "age": 12}')
    state = compiler.start(grammar)
    for place, token in enumerate(text):
        assert state.first_allowed(text[:place], [*ids("\x01"), token], 2) == [1]
    assert not state.first_allowed((), [EOS], 1)
    assert state.first_allowed(text, [EOS], 1) == [0]
    assert state.first_allowed(text[:1], text[1:2], 1) == [0]  # it is where it was


@pytest.mark.parametrize("length", range(0, 12, 3))
def test_a_single_token_check_agrees_with_the_mask(compiler: GrammarCompiler, length: int) -> None:
    """A text that has to follow is divided as the tokenizer does it, also where its first letter alone is a token."""
    grammar = Grammar("lark", 'start: "<tool_call>" /[a-z]{3}/ "</tool_call>"')
    text = ids("<tool_call>abc</tool_call>")
    beside = 0
    for place in range(len(text)):
        known, path = text[: max(0, place - length)], text[max(0, place - length) : place]
        mask = compiler.start(grammar, known).allowed(path)
        state = compiler.start(grammar, known)
        tokens = [token for token in range(VOCABULARY) if token != EOS]
        assert [*state.first_allowed(path, tokens, VOCABULARY)] == np.flatnonzero(mask[tokens]).tolist()
        beside += int(mask.sum() == 1 and mask[text[place]])
    assert beside > 2


def allowed(
    compiler: GrammarCompiler, grammar: Grammar, answer: Sequence[int], path: Sequence[int]
) -> NDArray[np.int64]:
    return np.flatnonzero(compiler.start(grammar, answer).allowed(path))


def test_a_path_is_followed_and_left_again(compiler: GrammarCompiler) -> None:
    grammar, text = Grammar("json_schema", PERSON), ids('{"name": "bob", "age": 12}')
    state = compiler.start(grammar)
    for length in range(len(text)):
        assert state.allowed(text[:length])[text[length]]
    assert np.flatnonzero(state.allowed(text)).tolist() == [EOS]
    assert not state.allowed([*text, EOS, 7]).any()
    assert not state.allowed([ids("x")[0]]).any()
    for at in range(len(text)):
        state.extend(text[at : at + 1])
        fresh = compiler.start(grammar, text[: at + 1])
        for path in ((), text[at + 1 : at + 2], text[at + 1 :]):
            assert (state.allowed(path) == fresh.allowed(path)).all()


def test_forced_tokens_are_the_text_that_must_follow(compiler: GrammarCompiler) -> None:
    state = compiler.start(Grammar("regex", "once upon a time(, long ago)?"))
    forced = state.forced()
    assert "once upon a time".startswith(TOKENIZER.decode(forced))
    assert len(forced) > 2
    state.extend(forced)
    assert state.forced() != forced


def test_the_end_of_a_grammar_counts_for_more_than_a_least_length(compiler: GrammarCompiler) -> None:
    for compiled in (True, False):
        tokens, ended = generated(compiler, Grammar("choices", '["yes"]'), 3, min_tokens=50, compiled=compiled)
        assert (TOKENIZER.decode(tokens), ended) == ("yes", True)
        tokens, ended = generated(compiler, Grammar("regex", "a*"), 3, most=40, min_tokens=20, compiled=compiled)
        assert len(tokens) >= 20


def test_a_text_ends_when_the_contract_bans_every_token_that_the_grammar_allows(compiler: GrammarCompiler) -> None:
    banned = tuple(id_ for id_ in range(VOCABULARY) if TOKENIZER.decode([id_]).startswith("y"))
    assert generated(compiler, Grammar("choices", '["yes"]'), 3, banned_ids=banned) == ([], True)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("json_schema", "{"), "cannot be"),
        (Grammar("json_schema", '{"$ref": "#/nope"}'), "does not exist"),
        (Grammar("json_schema", '{"allOf": [{"type": "integer"}, {"type": "string"}]}'), "Unsatisfiable"),
        (Grammar("json_schema", '{"$ref": "#"}'), "cannot be followed: it allows no text$"),
        (Grammar("regex", "("), "cannot be followed"),
        (Grammar("choices", "[]"), "cannot be"),
        (Grammar("lark", "start: nothing"), "cannot be followed"),
        (Grammar("choices", "[" * MAX_GRAMMAR), "cannot be"),
        (Grammar("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000), "cannot be"),
        (Grammar("regex", "(" * 60_000 + ")" * 60_000), "cannot be"),
        (Grammar("lark", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000), "cannot be"),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_followed_is_refused_by_name_within_a_bounded_time(
    compiler: GrammarCompiler, grammar: Grammar, problem: str
) -> None:
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=problem) as refused:
            compiler.start(grammar)
        assert refused.value.field == "grammar"
    assert time.monotonic() - began < 10


def test_texts_that_are_no_grammar_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be one of json_schema, regex, choices, lark"):
        Grammar("xml", "")
    with pytest.raises(InvalidRequest, match="characters, must have at most"):
        Grammar("regex", "a" * (MAX_GRAMMAR + 1))


async def test_a_background_grammar_is_compiled_once() -> None:
    compiler, grammar = GrammarCompiler(FOLDER, VOCABULARY, [EOS]), Grammar("choices", '["a", "b"]')
    wrong = Grammar("regex", "(")
    for _ in range(200):
        found, none = compiler.known(grammar, ids("a")), compiler.known(wrong)
        assert none is None
        if found is not None:
            break
        await asyncio.sleep(0.02)
    assert found is not None
    assert np.flatnonzero(found.allowed(())).tolist() == [EOS]
    with pytest.raises(InvalidRequest):
        await compiler.check(wrong)
    assert compiler.usage.processes == 1
