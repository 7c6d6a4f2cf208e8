"""Divides a streamed answer into blocks: reasoning, text and calls, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from outrider.core.answers.answer_reader import AnswerReader
from outrider.core.answers.call_reader import CallPiece
from outrider.gateway.multiplex import ReceivedPart
from outrider.gateway.serialize import call_id


class BlockChange(Enum):
    """What happens to a block."""

    BEGIN = auto()
    TEXT = auto()
    END = auto()


@dataclass(slots=True)
class StreamedBlock:
    """A part of an answer that is of one kind."""

    index: int
    call: int  # as of CallPiece: CONTENT, REASONING, or number of a call
    name: str = ""  # of a call
    id: str = ""  # of a call
    failed: bool = False  # the call has turned out to be none
    texts: list[str] = field(default_factory=list)  # kept by a format that needs them at its end


class BlockEvent(NamedTuple):
    """A change of a block."""

    change: BlockChange
    block: StreamedBlock
    text: str = ""  # further text; of a call, of its arguments


class BlockReader:
    """Reads an answer while it comes."""

    def __init__(self, id_prefix: str) -> None:
        """`id_prefix`: of calls' ids."""
        self._id_prefix = id_prefix
        self._reader: AnswerReader | None = None
        self._block: StreamedBlock | None = None
        self._blocks = 0

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them whole."""
        return self._reader is not None and self._reader.called

    def read(self, part: ReceivedPart) -> Iterator[BlockEvent]:
        """Yield what a further part changes; with the answer's end, the end of the last block."""
        if part.chunk is not None and part.chunk.text:
            self._reader = self._reader or part.reader()
            yield from self._changes(self._reader, self._reader.read(part.chunk.text))
        if part.ended is not None:
            if self._reader is not None:
                yield from self._changes(self._reader, self._reader.finish())
            yield from self._end()

    def _changes(self, reader: AnswerReader, pieces: Iterable[CallPiece]) -> Iterator[BlockEvent]:
        for piece in pieces:
            if piece.failed:  # its text repeats what has been sent as the call
                if self._block is not None and self._block.call == piece.call:
                    self._block.failed = True
                continue
            if self._block is None or self._block.call != piece.call:
                yield from self._end()
                id_ = call_id(reader.form, piece.id, self._id_prefix) if piece.call >= 0 else ""
                self._block = StreamedBlock(self._blocks, piece.call, piece.name, id_)
                self._blocks += 1
                yield BlockEvent(BlockChange.BEGIN, self._block)
            if piece.text:
                yield BlockEvent(BlockChange.TEXT, self._block, piece.text)

    def _end(self) -> Iterator[BlockEvent]:
        if self._block is not None:
            yield BlockEvent(BlockChange.END, self._block)
            self._block = None
