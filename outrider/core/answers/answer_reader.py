"""Divides an answer into reasoning, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from outrider.core.answers.call_reader import CONTENT, REASONING, CallPiece, CallReader
from outrider.core.answers.formats import FORMATS
from outrider.core.answers.reasoning import ReasoningReader


class ModelForm(NamedTuple):
    """How a model writes, as its chat template and the end of a prompt show."""

    tool_format: str = ""  # a name of FORMATS; empty: it knows no tools
    reasoning: str = ""  # see `Reasoning`


class AnswerTerms(NamedTuple):
    """What a request's answer may have in it."""

    tools: Collection[str] = ()  # names of those that it may call
    schema: bool = False  # it is JSON of a schema where it is no calls


PLAIN_FORM, ANY_TERMS = ModelForm(), AnswerTerms()


class AnswerReader:
    """Reads an answer to messages while it comes."""

    def __init__(self, form: ModelForm = PLAIN_FORM, terms: AnswerTerms = ANY_TERMS) -> None:
        self.form = form
        self._reasoning = ReasoningReader(opened=form.reasoning == "opened") if form.reasoning else None
        known = FORMATS.get(form.tool_format) if terms.tools else None
        self._calls = CallReader(known, terms.tools, json_content=terms.schema) if known is not None else None

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them whole."""
        return self._calls is not None and self._calls.called

    def read(self, text: str) -> list[CallPiece]:
        """Return what follows from more of the answer."""
        reasoning, rest = ("", text) if self._reasoning is None else self._reasoning.read(text)
        return [*_pieces(reasoning, REASONING), *self._read_rest(rest)]

    def finish(self) -> list[CallPiece]:
        """Return what was kept back, at the end of the answer."""
        reasoning, rest = ("", "") if self._reasoning is None else self._reasoning.finish()
        pieces = [*_pieces(reasoning, REASONING), *self._read_rest(rest)]
        return pieces if self._calls is None else [*pieces, *self._calls.finish()]

    def _read_rest(self, text: str) -> list[CallPiece]:
        return _pieces(text) if self._calls is None else self._calls.read(text)


def _pieces(text: str, call: int = CONTENT) -> list[CallPiece]:
    return [CallPiece(text, call)] if text else []
