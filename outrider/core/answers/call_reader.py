"""Reads calls of tools out of an answer while it comes."""

from __future__ import annotations

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


class _Place(Enum):
    CONTENT = auto()
    BEFORE = auto()  # a call
    OBJECT = auto()
    AFTER = auto()  # a call


class CallReader:
    """Divides an answer into content and calls, without changing either.

    What may become a call is kept back until that is known. Where the model's form has no mark before calls, and where
    the mark is missing, an answer that begins with JSON is a call if that names one of the tools.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        """`names`: of the tools."""
        self.calls = 0  # number of calls that have begun
        self._form = form
        self._names = names
        self._mark, self._end = form.begin.strip(), form.end.strip()
        self._bare = form.listed or not self._mark  # calls may come without a mark, as long as no content has
        self._place = _Place.CONTENT
        self._kept = ""  # text that was not looked at yet
        self._raw = ""  # text that is a call only if a name follows
        self._marked = False  # so it is one whatever the name
        self._listed = False  # within a list
        self._object = CallObject()

    def read(self, text: str) -> list[CallPiece]:
        """Return what follows from more of the answer."""
        self._kept += text
        return [*self._pieces(last=False)]

    def finish(self) -> list[CallPiece]:
        """Return what was kept back, at the end of the answer. A call that was cut off stays as it is."""
        pieces = [*self._pieces(last=True)]
        left, self._raw, self._kept = self._raw + self._kept, "", ""
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
        place = self._kept.find(self._mark) if self._mark else -1
        opening = self._kept.lstrip()[:1]
        if place >= 0:
            before, self._raw = self._kept[:place], self._mark
            self._kept = self._kept[place + len(self._mark) :]
            self._place, self._marked, self._bare = _Place.BEFORE, True, False
            if before.strip():
                yield CallPiece(before.rstrip())
        elif self._bare and opening and not last and self._mark.startswith(self._kept.lstrip()):
            return
        elif self._bare and opening in ("{", "["):
            self._place, self._marked = _Place.BEFORE, False
        elif opening or not self._bare:
            kept = 0 if last else self._may_be_mark()
            content, self._kept = self._kept[: len(self._kept) - kept], self._kept[len(self._kept) - kept :]
            if content and (content.strip() or not self.calls):
                self._bare = False
                yield CallPiece(content)

    def _may_be_mark(self) -> int:
        """Return how many characters at the end may belong to a mark, or are the spaces before it."""
        begun = begun_mark(self._kept, self._mark)
        sure = self._kept[: len(self._kept) - begun]
        return begun + len(sure) - len(sure.rstrip())

    def _read_opening(self, *, last: bool) -> Iterator[CallPiece]:
        opening = self._kept.lstrip()[:1]
        if self._form.separator:
            yield from self._read_name(last=last)
        elif opening == "{":
            self._place, self._object = _Place.OBJECT, CallObject()
        elif opening == "[" and not self._listed and (self._form.listed or not self._marked):
            self._listed = True
            self._raw += self._pass_over("[")
        elif opening:
            yield from self._give_up()

    def _read_name(self, *, last: bool) -> Iterator[CallPiece]:
        """Read what is before the separator: the name, and perhaps the call's number."""
        before, separator, after = self._kept.partition(self._form.separator)
        name = before.partition(CALL_ID)[0].strip()
        if separator and name:
            self._place, self._object = _Place.OBJECT, CallObject(name)
            self._raw, self._kept, self._bare = "", after, False
            self.calls += 1
            yield CallPiece("", self.calls - 1, name)
        elif separator or last or len(before) > LONGEST_NAME:
            yield from self._give_up()

    def _read_object(self, *, last: bool) -> Iterator[CallPiece]:
        call, known = self._object, bool(self._object.name)
        taken = call.read(self._kept)
        self._raw, self._kept = self._raw + self._kept[:taken], self._kept[taken:]
        if not known and call.name and self._is_tool(call.name):
            self._raw, self._bare, known = "", False, True
            self.calls += 1
            yield CallPiece("", self.calls - 1, call.name)
        if known:
            self._raw = ""
            if text := call.take():
                yield CallPiece(text, self.calls - 1)
            if call.complete or call.broken:
                self._place = _Place.AFTER
        elif call.name or call.complete or call.broken:
            yield from self._give_up()

    def _is_tool(self, name: str) -> bool:
        return self._marked or name in self._names

    def _read_end(self, *, last: bool) -> Iterator[CallPiece]:
        rest = self._kept.lstrip()
        opening = rest[:1]
        if opening and self._end.startswith(rest) and rest != self._end and not last:
            return
        if self._end and rest.startswith(self._end):
            self._pass_over(self._end)
            self._place = _Place.CONTENT
        elif opening == "]" and self._listed:
            self._pass_over("]")
            self._listed, self._place = False, _Place.CONTENT
        elif opening and opening == ("," if self._listed else ";"):
            self._raw = self._pass_over(opening)
            self._place = _Place.BEFORE
        elif opening:
            self._place = _Place.CONTENT
        yield from ()

    def _pass_over(self, text: str) -> str:
        """Read a text with the spaces before it, and return both."""
        end = self._kept.index(text) + len(text)
        passed, self._kept = self._kept[:end], self._kept[end:]
        return passed

    def _give_up(self) -> Iterator[CallPiece]:
        """Give out as content what has turned out to be no call."""
        content, self._raw = self._raw, ""
        self._place, self._bare, self._listed = _Place.CONTENT, False, False
        if content:
            yield CallPiece(content)
