"""Divides an answer into the model's reasoning and what follows it."""

from __future__ import annotations

from typing import Literal

from outrider.core.marks import begun_mark

BEGIN, END = "<think>", "</think>"
Reasoning = Literal["", "marked", "opened"]  # none; the answer begins with a mark; the prompt ends with it


def reasoning_of(template: str) -> Reasoning:
    """Return whether models of a chat template mark reasoning in their answers."""
    return "marked" if BEGIN in template else ""


def reasoning_behind(prompt: str) -> Reasoning:
    """Return whether such a model's answer to a prompt has reasoning, by the prompt's last characters."""
    end = prompt.rstrip()
    return "opened" if end.endswith(BEGIN) else "" if end.endswith(END) else "marked"


class ReasoningReader:
    """Reads the reasoning out of an answer while it comes."""

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends with the mark before it, so the answer begins with reasoning."""
        self._kept = ""
        self._inside = opened
        self._divided = False  # reasoning has ended
        self._begun = opened  # it is known whether there is reasoning
        self._leading = True  # lines after a mark are left out, of the reasoning and of what follows

    def read(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Return what follows from more of the answer: reasoning, and what comes after it."""
        self._kept += text
        if not self._begun and not self._begins(last):
            return "", ""
        reasoning = self._read_inside(last) if self._inside else ""
        if self._inside:
            return reasoning, ""
        if self._divided:
            self._skip_lines()
        rest, self._kept = self._kept, ""
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """Return what was kept back, at the end of the answer."""
        return self.read("", last=True)

    def _begins(self, last: bool) -> bool:
        """Return whether it is known by now if the answer begins with reasoning."""
        start = self._kept.lstrip()
        if start.startswith(BEGIN):
            self._inside, self._kept = True, start[len(BEGIN) :]
        elif BEGIN.startswith(start) and not last:
            return False
        self._begun = True
        return True

    def _read_inside(self, last: bool) -> str:
        self._skip_lines()
        before, end, after = self._kept.partition(END)
        if end:
            self._inside, self._divided, self._leading, self._kept = False, True, True, after
            return before.rstrip("\n")
        sure = before if last else before[: len(before) - begun_mark(before, END)]
        given = sure if last else sure.rstrip("\n")  # the lines before the mark are no part of it
        self._kept = before[len(given) :]
        return given

    def _skip_lines(self) -> None:
        if self._leading:
            self._kept = self._kept.lstrip("\n")
            self._leading = not self._kept


class ReasoningCounter:
    """Counts an answer's tokens up to the end mark of its reasoning, that which completes the mark included."""

    def __init__(self, reasoning: str = "") -> None:
        """`reasoning`: see `Reasoning`."""
        self.tokens = 0  # of the reasoning so far
        self._inside = reasoning == "opened"
        self._over = not reasoning
        self._seen = 0
        self._kept = ""  # what may belong to a mark

    def add(self, text: str) -> None:
        """Add the text that one token completes."""
        if self._over:
            return
        self._seen += 1
        self._kept += text
        if not self._inside:
            self._kept = self._kept.lstrip()
            self._inside = self._kept.startswith(BEGIN)
            self._over = not self._inside and not BEGIN.startswith(self._kept)
        if self._inside:
            self.tokens = self._seen
            self._over = END in self._kept
            self._kept = self._kept[-len(END) :]
