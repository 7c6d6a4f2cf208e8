"""One call of a tool, a JSON object that comes in pieces."""

from __future__ import annotations

import json

ARGUMENTS = ("arguments", "parameters")  # models mix them up
SPACES = " \t\r\n"


class CallObject:
    """Reads an object with a name and arguments, character by character. The arguments are given out as they come."""

    def __init__(self, name: str = "", id_: str = "") -> None:
        """`name`, `id_`: of tool and call, if they came before the object, which is the arguments alone then."""
        self.name = name
        self.id = id_
        self.complete = False
        self.broken = False  # it is no JSON object, or its name is no text
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the value that is read; None: a key or its end is expected
        self._colon = False  # there was one after the key
        self._ended = False  # the value, which is a string, a list or an object
        self._text: list[str] = []  # of the key or value that is read; of arguments that are given out, the beginning
        self._given: list[str] = []  # arguments that were not taken yet
        self._alone = bool(name)
        if self._alone:
            self._depth, self._key, self._colon = 1, ARGUMENTS[0], True

    @property
    def known(self) -> bool:
        """Whether the name is known, and the object has begun."""
        return bool(self.name) and (not self._alone or bool(self._text))

    def read(self, text: str) -> int:
        """Read as much of the text as belongs to the object, and return how many characters those are."""
        for place, character in enumerate(text):
            self._read(character)
            if self.complete or self.broken:
                return place + self.complete
        return len(text)

    def take(self) -> str:
        """Return the arguments that have come since they were taken last."""
        given, self._given = "".join(self._given), []
        return given

    def _read(self, character: str) -> None:
        if self._in_string:
            self._add(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1 and self._key is None:
                    self._end_key()
                else:
                    self._ended = self._depth == 1
        elif self._depth == 0:
            self._open(character)
        elif self._depth == 1 and not self._colon:
            self._read_between(character)
        else:
            self._read_value(character)

    def _open(self, character: str) -> None:
        if character == "{":
            self._depth = 1
        elif character not in SPACES:
            self.broken = True

    def _read_between(self, character: str) -> None:
        """Read what is around a key."""
        if character == '"' and self._key is None:
            self._in_string, self._text = True, [character]
        elif character == ":" and self._key is not None:
            self._colon, self._text = True, []
        elif character == "}" and self._key is None:
            self.complete = True
        elif character not in SPACES:
            self.broken = True

    def _read_value(self, character: str) -> None:
        if self._alone and not self._text and character not in SPACES + "{":
            self.broken = True
            return
        if self._depth == 1 and character in ",}":
            self._end_value()
            self.complete = character == "}" and not self.broken
            return
        if character in SPACES and not self._text:
            return
        if self._ended:
            self.broken = character not in SPACES  # its own brace is missing
            return
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._ended = self._depth == 1
        self._in_string = character == '"'
        self._add(character)
        self.complete = self._alone and self._depth == 1

    def _add(self, character: str) -> None:
        if self._colon and self._key in ARGUMENTS and (self._text or [character])[0] != '"':
            self._given.append(character)
            self._text = self._text or [character]
        else:
            self._text.append(character)

    def _end_key(self) -> None:
        self._key = self._string()

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = self._string()
            self.broken = not self.name
        elif self._key in ARGUMENTS and self._text[:1] == ['"']:
            self._given.append(self._string())  # OpenAI's own form: JSON in a string
        self._key, self._colon, self._ended, self._text = None, False, False, []

    def _string(self) -> str:
        try:
            value = json.loads("".join(self._text))
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.broken = True
            return ""
        return value
