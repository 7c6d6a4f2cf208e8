"""Compiles grammars for one model's vocabulary. Time and memory of what a caller sends are bounded.

Compiled grammars are kept, because drafters, forks and resumed sessions need them again. A state that is taken from one
is a copy.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.grammar import GrammarState
from outrider.core.session.contract import Grammar
from outrider.core.tools.reasoning import BEGIN, END
from outrider.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._grammar_from import GrammarFormat

KEPT = 32  # compiled grammars
KEPT_MASKS = 32  # of one state, a byte for each id
INITIAL_FUEL = 1_000_000  # of llguidance for compiling a grammar, some 20 ms
STEP_FUEL = 200_000  # for a mask, some 15 ms
STEP_ITEMS = 50_000
MAX_SYMBOLS = 100_000
WHITESPACE = r"\n?[ \t]{0,16}"  # between the parts of JSON: without a bound a model may write nothing else for ever
MAX_STATES = 10_000  # about 2 kB each


class GrammarCompiler:
    """Grammars for the vocabulary of one checkpoint. May be used in any thread."""

    def __init__(self, folder: Path, vocabulary: int, eos_ids: Sequence[int]) -> None:
        """`folder`: of the checkpoint; `vocabulary`: ids that can be chosen; `eos_ids`: those that end a text.

        The tokenizer is read at the first use.
        """
        self._folder = folder
        self._vocabulary = vocabulary
        self._eos_ids = [id_ for id_ in eos_ids if id_ < vocabulary]
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher | InvalidRequest] = OrderedDict()
        self._compiling: set[Grammar] = set()  # in the background
        self._background = ThreadPoolExecutor(1, "grammars")

    def start(self, grammar: Grammar, answer: Sequence[int] = ()) -> GrammarState:
        """Return the place in a grammar behind an answer's tokens.

        Takes a moment for a grammar that is not known yet. Raises InvalidRequest for one that cannot be followed, or
        takes too much to compile; ConfigError where llguidance is missing.
        """
        with self._lock:
            found = self._compiled.get(grammar)
        return self._begin(self._remember(grammar) if found is None else found, grammar, answer)

    def known(self, grammar: Grammar, answer: Sequence[int] = ()) -> GrammarState | None:
        """Return the same, without waiting: None while the grammar is compiled, and if it cannot be."""
        with self._lock:
            found = self._compiled.get(grammar)
            begins = found is None and grammar not in self._compiling and len(self._compiling) < KEPT
            if begins:
                self._compiling.add(grammar)
        if begins:
            self._background.submit(self._remember, grammar)
        return None if found is None or isinstance(found, InvalidRequest) else self._begin(found, grammar, answer)

    def _begin(self, found: LLMatcher | InvalidRequest, grammar: Grammar, answer: Sequence[int]) -> GrammarState:
        if isinstance(found, InvalidRequest):
            raise found
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            state = _State(found.deep_copy(), self._vocabulary, self._eos_ids)
        state.extend(answer)
        return state

    def _remember(self, grammar: Grammar) -> LLMatcher | InvalidRequest:
        """Compile a grammar and keep it, or why that fails."""
        try:
            found: LLMatcher | InvalidRequest = self._compile(grammar)
        except InvalidRequest as error:
            found = error
        finally:
            with self._lock:
                self._compiling.discard(grammar)
        with self._lock:
            self._compiled[grammar] = found
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            import llguidance
        except ImportError:
            raise ConfigError("grammar: needs llguidance, which is not installed; pip install llguidance") from None
        try:
            with self._reading:
                if self._tokenizer is None:
                    path = self._folder / "tokenizer.json"
                    self._tokenizer = llguidance.LLTokenizer(str(path), self._vocabulary, self._eos_ids)
        except ValueError as error:
            raise InvalidRequest("grammar", f"does not work with this model's tokenizer: {error}") from None
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_lexer_states=MAX_STATES,
            max_grammar_size=MAX_SYMBOLS,
            verbose_errors=False,
        )
        try:
            if grammar.kind == "json_schema":
                source = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": WHITESPACE})
            elif grammar.kind == "choices":
                source = llguidance.grammar_from("choice", _checked_choices(grammar.text))
            else:
                source = llguidance.grammar_from(cast("GrammarFormat", grammar.kind), grammar.text)
            if grammar.reasoning:
                source = self._behind_reasoning(source, optional=grammar.reasoning == "marked")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("grammar", f"cannot be read: {error}") from None
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest("grammar", f"cannot be followed: {matcher.get_error()}")
        if not _State(matcher.deep_copy(), self._vocabulary, self._eos_ids).allowed(()).any():
            raise InvalidRequest("grammar", "cannot be followed: no token of the model begins such a text")
        return matcher

    def _behind_reasoning(self, source: str, *, optional: bool) -> str:
        """Return a grammar in llguidance's form with reasoning before it; `optional`: it may begin with a mark, or be
        missing; otherwise the prompt has that mark."""
        grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
        grammars[0]["name"] = "answer"
        special = self._special_ids
        end = f"/(?s:.*)/ <[{special[END]}]>" if END in special else f"[suffix={json.dumps(END)}]: /(?s:.*)/"
        begin = f"<[{special[BEGIN]}]>" if BEGIN in special else json.dumps(BEGIN)
        before = f"({begin} reasoning)?" if optional else "reasoning"
        rules = (f"start: {before} @answer", "reasoning: thought SPACE", r"SPACE: /\s{0,8}/")
        thought = f"thought: {end}" if END in special else f"thought{end}"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join((*rules, thought))}, *grammars]})

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        """The ids of the tokenizer's special tokens, by their text. Its file may have many megabytes."""
        added = json.loads((self._folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        return {token["content"]: token["id"] for token in added if token.get("special")}


def _checked_choices(text: str) -> str:
    """Return the text. Raises ValueError where it is no list of choices."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(it, str) and it for it in choices):
        raise ValueError("choices must be strings, at least one, and none of them empty")
    return text


class _State:
    """A place in a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._masks: dict[tuple[int, ...], NDArray[np.bool_]] = {}  # by path
        self._forced: list[int] | None = None
        self._firsts: dict[tuple[int, ...], int | None] = {}  # of what is forced, by path

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        key = tuple(path)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= KEPT_MASKS:
                self._masks.clear()
            mask = self._masks[key] = self._compute(key)
        return mask

    def allows(self, path: Sequence[int], token: int) -> bool:
        key = tuple(path)
        if key in self._masks or token in self._eos_ids:  # an end is no token that the matcher could take back
            return bool(self.allowed(key)[token])
        with self._behind(key) as followed:
            if not followed:
                return False
            forced = self._forced_after(key)
            if forced is not None:  # the mask, too, divides a text that has to follow in one way alone
                return token == forced
            with self._behind((token,)) as follows:
                return follows

    def _forced_after(self, path: tuple[int, ...]) -> int | None:
        """Return the first token of the text that has to follow `path`, which the matcher has taken."""
        if path not in self._firsts:
            if len(self._firsts) >= KEPT_MASKS:
                self._firsts.clear()
            self._firsts[path] = next(iter(self._matcher.compute_ff_tokens()), None)
        return self._firsts[path]

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._matcher.try_consume_tokens(list(tokens))  # what is behind an end that was ignored changes nothing
            self._masks.clear()
            self._firsts.clear()
            self._forced = None

    def forced(self) -> list[int]:
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced

    def _compute(self, path: tuple[int, ...]) -> NDArray[np.bool_]:
        with self._behind(path) as followed:
            if not followed:
                return np.zeros(self._vocabulary, np.bool_)
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)

    @contextmanager
    def _behind(self, path: Sequence[int]) -> Iterator[bool]:
        """Have the matcher take a path meanwhile. Yields whether it may follow."""
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            yield taken == len(path)
        finally:
            if taken:
                self._matcher.rollback(taken)
