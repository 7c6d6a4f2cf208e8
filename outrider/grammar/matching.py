"""A compiled grammar and places in it, by llguidance; another library may take its place behind these two classes.

Which tokens may follow an answer is a function of the grammar and the answer's tokens alone, so that a session that
moves, and a drafter, find the same state. Where the grammar allows one text only, that text is divided into tokens
once, and the answer follows that division to its end: no other tokens may spell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outrider.core.answers.reasoning import BEGIN, END
from outrider.core.answers.schemas import WHITESPACE, closed, followable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._grammar_from import GrammarFormat

INITIAL_FUEL = 1_000_000  # of llguidance for compiling a grammar, some 20 ms
STEP_FUEL = 200_000  # for a mask, some 15 ms
STEP_ITEMS = 50_000
MAX_SYMBOLS = 100_000
MAX_STATES = 10_000  # about 2 kB each
SPELT = 32  # bytes that are spelt greedily at a time
MAX_FORCED = 1024  # tokens of a text that has to follow; behind them the rest is divided


class GrammarError(Exception):
    """A grammar cannot be compiled or followed. Its text says why."""


class TokenizerError(Exception):
    """Grammars do not work with the model's tokenizer, or llguidance is missing."""


class GrammarVocabulary:
    """The tokenizer of one checkpoint, as grammars use it. It is read when this is made."""

    def __init__(self, path: Path, size: int, eos_ids: Sequence[int]) -> None:
        """`path`: of a tokenizer.json, which is read once, or of its folder; `size`: ids that can be chosen; `eos_ids`:
        those that end a text."""
        self.size = size
        self.eos_ids = frozenset(id_ for id_ in eos_ids if id_ < size)
        self.mask_bytes = -(-size // 8)  # a bit for each id
        self.problem = ""  # why there are no grammars
        content = (path / "tokenizer.json" if path.is_dir() else path).read_text(encoding="utf-8")
        self.added_ids = _added_ids(content)  # by the added token's text
        self._tokenizer: LLTokenizer | None = None
        try:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(content, size, sorted(self.eos_ids))
        except ImportError:
            self.problem = "needs llguidance, which is not installed; pip install llguidance"
        except ValueError as error:
            self.problem = f"does not work with this model's tokenizer: {error}"

    @property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer. Raises TokenizerError."""
        if self._tokenizer is None:
            raise TokenizerError(self.problem)
        return self._tokenizer


class CompiledGrammar:
    """A grammar, compiled for a vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary, kind: str, text: str, reasoning: str) -> None:
        """The inputs are those of `outrider.core.session.contract.Grammar`. Raises GrammarError, TokenizerError."""
        tokenizer = vocabulary.tokenizer
        import llguidance

        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_lexer_states=MAX_STATES,
            max_grammar_size=MAX_SYMBOLS,
            verbose_errors=False,
        )
        try:
            if kind == "json_schema":
                schema = json.dumps(closed(followable(json.loads(text)).schema))
                source = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE})
            elif kind == "choices":
                source = llguidance.grammar_from("choice", _checked_choices(text))
            else:
                source = llguidance.grammar_from(cast("GrammarFormat", kind), text)
            if reasoning:
                source = _behind_reasoning(vocabulary.added_ids, source, optional=reasoning == "marked")
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"cannot be read: {error}") from None
        self._vocabulary = vocabulary
        self._matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise GrammarError(f"cannot be followed: {_problem(self._matcher)}")
        if not any(self.begin().mask(())):
            raise GrammarError("cannot be followed: no token of the model begins such a text")

    def begin(self) -> GrammarWalk:
        """Return the place before the answer's first token."""
        return GrammarWalk(self._matcher.deep_copy(), self._vocabulary)


class GrammarWalk:
    """A place in a grammar, behind the committed tokens of an answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._untaken: list[int] = []  # committed tokens that the matcher has not taken, all of them forced ones
        self._forced_after: dict[tuple[int, ...], list[int] | None] = {}  # by path; see `_forced`

    @property
    def forced(self) -> list[int]:
        """The tokens of the text that has to follow, at most MAX_FORCED; often none."""
        return self._forced(()) or []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            forced = self.forced
            self._forced_after.clear()
            self._untaken.append(token)
            if forced and forced[0] == token and len(forced) > 1:
                self._forced_after[()] = forced[1:]
            else:
                self._take()

    def mask(self, path: Sequence[int]) -> bytes:
        """Return which ids may follow the committed tokens and `path`: a bit for each, the lowest first. None may
        follow a wrong path. Where the text may end, the ids that end it are among them."""
        key = tuple(path)
        forced = self._forced(key)
        if not forced and forced is not None:
            with self._behind(key):
                mask = self._matcher.compute_bitmask()
                self._check()
            return mask[: self._vocabulary.mask_bytes]
        return (1 << forced[0] if forced else 0).to_bytes(self._vocabulary.mask_bytes, "little")

    def first(self, path: Sequence[int], tokens: Sequence[int], count: int) -> list[int]:
        """Return the indexes of the first `count` tokens that may follow `path`: less work than the mask."""
        key = tuple(path)
        forced = self._forced(key)
        if forced is None:
            found = []
        elif forced:
            found = [index for index, token in enumerate(tokens) if token == forced[0]]
        elif self._vocabulary.eos_ids.isdisjoint(tokens):
            found = self._first_taken(key, tokens, count)
        else:  # an end is no token that the matcher could take back
            mask = self.mask(key)
            found = [index for index, token in enumerate(tokens) if mask[token // 8] >> token % 8 & 1]
        return found[:count]

    def _first_taken(self, path: tuple[int, ...], tokens: Sequence[int], count: int) -> list[int]:
        found: list[int] = []
        with self._behind(path):
            for index, token in enumerate(tokens):
                if self._matcher.try_consume_tokens([token]):
                    self._matcher.rollback(1)
                    found.append(index)
                    if len(found) == count:
                        break
            self._check()
        return found

    def _forced(self, path: tuple[int, ...]) -> list[int] | None:
        """Return the text that has to follow a path; None where the path itself may not follow."""
        known = len(path)
        while known and path[:known] not in self._forced_after:
            known -= 1
        for length in range(known, len(path) + 1):
            self._remember(path[:length])
        return self._forced_after[path]

    def _remember(self, path: tuple[int, ...]) -> None:
        """Find out what has to follow a path, for whose beginning that is known."""
        if path in self._forced_after:
            return
        before = self._forced_after[path[:-1]] if path else []
        if before is None or (before and before[0] != path[-1]) or (path and path[-1] in self._vocabulary.eos_ids):
            found = None  # nothing follows an end
        elif len(before) > 1:
            found = before[1:]
        else:
            with self._behind(path) as taken:
                found = self._divided() if taken else None
        self._forced_after[path] = found

    def _divided(self) -> list[int]:
        """Return the tokens of the text that has to follow what the matcher has taken, up to the first that the matcher
        would not take: a text in which an added token's occurs, or characters that the tokenizer rewrites, is spelt
        greedily there, by the longest tokens."""
        tokens = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        tokens = [*takewhile(lambda token: token < self._vocabulary.size, tokens)]
        taken = self._matcher.validate_tokens(tokens)
        if tokens and not taken:
            text = self._matcher.compute_ff_bytes()[:SPELT].decode(errors="ignore")
            tokens = self._vocabulary.tokenizer.greedy_tokenize(text)
            taken = self._matcher.validate_tokens(tokens)
        return tokens[:taken]

    @contextmanager
    def _behind(self, path: tuple[int, ...]) -> Iterator[bool]:
        """Have the matcher take a path meanwhile. Yield whether it may follow."""
        self._take()
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            yield taken == len(path)
        finally:
            if taken:
                self._matcher.rollback(taken)

    def _take(self) -> None:
        """Have the matcher take what is committed. What is behind an end that was ignored changes nothing."""
        if self._untaken:
            self._matcher.try_consume_tokens(self._untaken)
            self._untaken = []

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"cannot be followed: {_problem(self._matcher)}")


def _problem(matcher: LLMatcher) -> str:
    """Return the error of a matcher in words."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "it allows no text" if text == "NoExtensionBias" else text


def _added_ids(text: str) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens, special or not, by their text. Of its JSON, which may have many
    megabytes, only their list is parsed."""
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)  # in a key or a token's text its quotes would be escaped
    added = json.JSONDecoder().raw_decode(text, found.end())[0] if found else []
    return {token["content"]: token["id"] for token in added}


def _behind_reasoning(added: dict[str, int], source: str, *, optional: bool) -> str:
    """Return a grammar in llguidance's form with reasoning before it; `optional`: it may begin with a mark, or be
    missing; otherwise the prompt has that mark. `added`: ids of added tokens, by their text."""
    grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    grammars[0]["name"] = "answer"
    end = f"/(?s:.*)/ <[{added[END]}]>" if END in added else f"[suffix={json.dumps(END)}]: /(?s:.*)/"
    begin = f"<[{added[BEGIN]}]>" if BEGIN in added else json.dumps(BEGIN)
    before = f"({begin} reasoning)?" if optional else "reasoning"
    rules = (f"start: {before} @answer", "reasoning: thought SPACE", r"SPACE: /\s{0,8}/")
    thought = f"thought: {end}" if END in added else f"thought{end}"
    return json.dumps({"grammars": [{"lark_grammar": "\n".join((*rules, thought))}, *grammars]})


def _checked_choices(text: str) -> str:
    """Return the text. Raises ValueError where it is no list of choices."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(it, str) and it for it in choices):
        raise ValueError("choices must be strings, at least one, and none of them empty")
    return text
