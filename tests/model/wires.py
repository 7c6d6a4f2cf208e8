"""Streams between parts: in order within a direction, at any pace between them, and they break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Receiver = Callable[[Any], None]
Notice = Literal["now", "later", "never"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The other side is done: the last item that is received. `error` is the name of the class of what it raised."""

    error: str = ""
    details: str = ""


BROKEN = Ended("Unavailable", "the stream broke")


class Wire:
    """One direction of a stream. What is put in is received in this order, once it is delivered."""

    def __init__(self, name: str, receive: Receiver) -> None:
        self.name = name
        self.items: deque[Any] = deque()
        self.receive = receive
        self.moved: Callable[[], None] | None = None  # called when there is room again
        self.open = True  # the receiver takes part, and what is sent reaches it
        self.held = False  # the network delivers nothing for a while

    def __str__(self) -> str:
        return f"{self.name} {' '.join(str(self.items[0]).split()) if self.items else ''}"

    def put(self, item: Any) -> None:
        """Sends; the item is lost where the wire is shut."""
        if self.open:
            self.items.append(item)

    def deliver(self) -> None:
        """The receiver gets the oldest item."""
        item = self.items.popleft()
        if isinstance(item, Ended):
            self.shut()
        self.receive(item)
        if self.moved is not None:
            self.moved()

    def shut(self) -> None:
        """Nothing more is received."""
        self.open = False
        self.items.clear()


class Link:
    """A stream of two directions between a caller and a server."""

    def __init__(self, name: str, server: Receiver, caller: Receiver) -> None:
        self.name = name
        self.forth = Wire(f"{name} >", server)
        self.back = Wire(f"{name} <", caller)
        self.deaf: list[Wire] = []  # directions that broke without their receiver having noticed

    @property
    def over(self) -> bool:
        """Whether nothing can happen on it any more."""
        return not (self.forth.open or self.back.open or self.deaf)

    def end(self, ended: Ended) -> None:
        """The server is done: the caller receives the end behind what was sent before."""
        self._leave(self.forth)
        self.back.put(ended)

    def leave(self) -> None:
        """The caller is done: it receives nothing more; the server receives the end behind what was sent before."""
        self._leave(self.back)
        self.forth.put(BROKEN)

    def cut(self, *, caller: Notice = "now", server: Notice = "now") -> None:
        """It breaks: what was under way is lost. `caller`, `server`: when each side notices; a dead one never does."""
        for wire, notice in ((self.forth, server), (self.back, caller)):
            if wire.open:
                wire.shut()
                if notice != "never":
                    self.deaf.append(wire)
            if notice == "never" and wire in self.deaf:
                self.deaf.remove(wire)
        for wire, notice in ((self.forth, server), (self.back, caller)):
            if notice == "now" and wire in self.deaf:
                self.notice(wire)

    def notice(self, wire: Wire) -> None:
        """A receiver finds out that its direction broke."""
        self.deaf.remove(wire)
        wire.receive(BROKEN)
        if wire.moved is not None:
            wire.moved()

    def _leave(self, wire: Wire) -> None:
        wire.shut()
        if wire in self.deaf:
            self.deaf.remove(wire)
