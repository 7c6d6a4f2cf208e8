"""Reads calls of tools out of an answer while it comes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from enum import Enum, auto
from typing import NamedTuple

from outrider.core.answers.call_object import CallObject
from outrider.core.answers.formats import CALL_ID, ToolFormat
from outrider.core.marks import begun_mark

CONTENT, REASONING = -1, -2  # of no call
LONGEST_NAME = 256  # characters between a mark and a separator


class CallPiece(NamedTuple):
    """A part of an answer: of its content, of its reasoning, or of a call."""

    text: str  # of a call: of its arguments, which are JSON
    call: int = CONTENT  # number of the call, or one of the above
    name: str = ""  # of the tool, in the first part of a call
    id: str = ""  # of the call, in its first part, if the model gave one
    failed: bool = False  # the call's arguments are no JSON: `text` is what the model wrote instead of a call


class _Place(Enum):
    CONTENT = auto()
    BEFORE = auto()  # a call
    OBJECT = auto()
    AFTER = auto()  # a call


class CallReader:
    """Divides an answer into content and calls. The arguments of a call are a JSON object; all else is content,
    without the marks of calls.

    What may become a call is kept back until its name is known; then its arguments are given out as they come, and the
    last part says so where they have turned out to be no JSON. Where calls have no mark, or are in a list whose mark is
    missing, an answer that begins with JSON is a call if that names one of the tools.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, json_content: bool = False) -> None:
        """`names`: of the tools; `json_content`: an answer that begins with content is JSON, in whose strings marks are
        text."""
        self.calls = 0  # number of calls that have begun
        self.failed = False  # one of them turned out to be text
        self._form = form
        self._names = names
        self._mark, self._end = form.begin.strip(), form.end.strip()
        self._bare = form.listed or not self._mark  # calls may come without a mark, as long as no content has
        self._json_content = json_content
        self._no_marks = False  # all that comes is content
        self._place = _Place.CONTENT
        self._kept = ""  # text that was not looked at yet
        self._raw: list[str] = []  # text that is a call only if it is read to its end
        self._marked = False  # it is behind a mark, so a call under any name
        self._listed = False  # within a list
        self._object = CallObject()
        self._begun = False  # the call's first part was given out
        self._arguments: list[str] = []  # of the call

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them whole."""
        return self.calls > 0 and not self.failed and not self._begun

    def read(self, text: str) -> list[CallPiece]:
        """Return what follows from more of the answer."""
        self._kept += text
        return [*self._pieces(last=False)]

    def finish(self) -> list[CallPiece]:
        """Return what was kept back, at the end of the answer. A call whose arguments were cut off has failed."""
        pieces = [*self._pieces(last=True)]
        if self._begun:
            pieces += self._end_call()
        left, self._kept = "".join(self._raw) + self._kept, ""
        self._raw = []
        left = left.strip() if self._marked else left
        return [*pieces, CallPiece(left)] if left.strip() or (left and not self.calls) else pieces

    def _pieces(self, *, last: bool) -> Iterator[CallPiece]:
        steps = {
            _Place.CONTENT: self._read_content,
            _Place.BEFORE: self._read_opening,
            _Place.OBJECT: self._read_object,
            _Place.AFTER: self._read_end,
        }
        before: tuple[_Place, str] | None = None
        while self._kept and before != (before := (self._place, self._kept)):
            yield from steps[self._place](last=last)

    def _read_content(self, *, last: bool) -> Iterator[CallPiece]:
        rest = self._kept.lstrip()
        begins = self._may_begin(rest, last=last)
        if self._bare and rest and not rest.startswith(self._mark or "\0"):
            if begins:
                return
            if rest[0] in "{[":
                self._place, self._marked = _Place.BEFORE, False
                return
        if self._json_content and rest and not begins and not self.calls:
            self._no_marks = True
        if self._no_marks:
            content, self._kept = self._kept, ""
            yield CallPiece(content)
            return
        place, mark = self._first_mark()
        if mark:
            before, self._kept = self._kept[:place], self._kept[place + len(mark) :]
            self._bare = False
            if mark == self._mark:
                self._place, self._marked = _Place.BEFORE, True
            if before.strip():
                yield CallPiece(before.rstrip())
        elif rest or not self._bare:
            kept = 0 if last else self._may_be_mark()
            content, self._kept = self._kept[: len(self._kept) - kept], self._kept[len(self._kept) - kept :]
            if content and (content.strip() or not self.calls):
                self._bare = False
                yield CallPiece(content)

    def _may_begin(self, text: str, *, last: bool) -> bool:
        """Return whether a text begins with the mark of calls, or may once more of it is there."""
        return bool(self._mark) and (text.startswith(self._mark) or (self._mark.startswith(text) and not last))

    def _first_mark(self) -> tuple[int, str]:
        """Return where the first mark is in the text, and which; an end without a beginning is none of the content."""
        found = [(self._kept.find(mark), mark) for mark in (self._mark, self._end) if mark and mark in self._kept]
        return min(found, default=(-1, ""))

    def _may_be_mark(self) -> int:
        """Return how many characters at the end may belong to a mark, or are the spaces before it."""
        begun = max(begun_mark(self._kept, mark) for mark in (self._mark, self._end))
        sure = self._kept[: len(self._kept) - begun]
        return begun + len(sure) - len(sure.rstrip())

    def _read_opening(self, *, last: bool) -> Iterator[CallPiece]:
        opening = self._kept.lstrip()[:1]
        if self._form.separator:
            yield from self._read_name(last=last)
        elif opening == "{":
            self._begin_object(CallObject())
        elif opening == "[" and not self._listed and (self._form.listed or not self._marked):
            self._listed = True
            self._raw.append(self._pass_over("["))
        elif opening:
            yield from self._give_up()

    def _read_name(self, *, last: bool) -> Iterator[CallPiece]:
        """Read what is before the separator: the name, and perhaps the call's number."""
        before, separator, after = self._kept.partition(self._form.separator)
        name, _, id_ = before.partition(CALL_ID)
        if len(before) - begun_mark(before, self._form.separator) > LONGEST_NAME or (last and not separator):
            yield from self._give_up()
        elif separator and name.strip():
            self._raw, self._kept = [before.replace(CALL_ID, "")], after
            self._begin_object(CallObject(name.strip(), id_.strip()))
        elif separator:
            self._kept = before + after
            yield from self._give_up()

    def _begin_object(self, object_: CallObject) -> None:
        self._place, self._object, self._arguments = _Place.OBJECT, object_, []

    def _read_object(self, *, last: bool) -> Iterator[CallPiece]:
        call = self._object
        taken = call.read(self._kept)
        self._raw.append(self._kept[:taken])
        self._kept = self._kept[taken:]
        if not self._begun and call.known and self._is_tool(call.name):
            self._begun, self._bare = True, False
            self.calls += 1
            yield CallPiece("", self.calls - 1, call.name, call.id)
        if self._begun:
            yield from self._arguments_so_far()
            if call.complete or call.broken:
                yield from self._end_call()
        elif call.known or call.complete or call.broken:
            yield from self._give_up()

    def _arguments_so_far(self) -> Iterator[CallPiece]:
        if text := self._object.take():
            self._arguments.append(text)
            yield CallPiece(text, self.calls - 1)

    def _end_call(self) -> Iterator[CallPiece]:
        """End a call: one without arguments has empty ones, and one whose arguments are whole may lack its brace."""
        if self._object.complete and not self._arguments:
            self._arguments.append("{}")
            yield CallPiece("{}", self.calls - 1)
        self._begun, self._place = False, _Place.AFTER
        if not _is_object("".join(self._arguments)):
            text, self.failed = "".join(self._raw), True
            self._end_calls()
            yield CallPiece(text.strip(" \n,;") if self._marked else text, self.calls - 1, failed=True)
        self._raw, self._arguments = [], []

    def _is_tool(self, name: str) -> bool:
        return self._marked or name in self._names

    def _read_end(self, *, last: bool) -> Iterator[CallPiece]:
        rest = self._kept.lstrip()
        opening = rest[:1]
        if opening and self._end.startswith(rest) and rest != self._end and not last:
            return
        if self._end and rest.startswith(self._end):
            self._pass_over(self._end)
            self._end_calls()
        elif opening == "]" and self._listed:
            self._pass_over("]")
            self._end_calls()
        elif opening and opening == ("," if self._listed else ";"):
            self._raw = [self._pass_over(opening)]
            self._place = _Place.BEFORE
        elif opening:
            self._end_calls()
        yield from ()

    def _end_calls(self) -> None:
        """Go on with content, outside of any list."""
        self._place, self._listed = _Place.CONTENT, False

    def _pass_over(self, text: str) -> str:
        """Read a text with the spaces before it, and return both."""
        end = self._kept.index(text) + len(text)
        passed, self._kept = self._kept[:end], self._kept[end:]
        return passed

    def _give_up(self) -> Iterator[CallPiece]:
        """Give out as content what has turned out to be no call."""
        content, self._raw = "".join(self._raw), []
        self._end_calls()
        self._bare = False
        if self._marked:
            content = content.lstrip()
            self._kept = self._kept if content else self._kept.lstrip()
        if content:
            yield CallPiece(content)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
