"""Texts that a target wrote, with its distribution at each token that it chose, in files that grow.

Four flat files: the ids of all texts; for each chosen token the ids of the target's likeliest tokens and their
log-probabilities, raw and at temperature 1; and an entry for each text, which is written last, so that a killed
training leaves nothing that is read as a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError

NAMES = ("tokens", "ids", "logprobs", "entries")
TOP = 64  # likeliest tokens that are kept

_ENTRY = np.dtype(
    [("tokens", "<u4"), ("asked", "<u4"), ("chosen", "<u4"), ("answer", "<u4"), ("temperature", "<f4"), ("seed", "<u8")]
)


@dataclass(frozen=True, slots=True, eq=False)
class TargetAnswer:
    """A text: given ids, an instruction of the target's or none, given ids, and the target's answer."""

    tokens: NDArray[np.uint32]  # [n]
    asked: slice  # of the instruction's tokens
    answer: int  # index of the answer's first token
    temperature: float  # of all that the target chose
    seed: int  # of its shared noise
    ids: NDArray[np.uint32]  # [chosen, TOP] likeliest first; the rows of the instruction, then those of the answer
    logprobs: NDArray[np.float16]  # [chosen, TOP]

    @property
    def chosen(self) -> NDArray[np.int64]:
        """Indices of the tokens that the target chose."""
        found: NDArray[np.int64] = np.r_[self.asked, self.answer : len(self.tokens)]
        return found


class AnswerStore:
    """The texts of a folder. Memory holds their entries alone."""

    def __init__(self, folder: Path) -> None:
        """Open a folder, or make one. What a killed process left half written is cut off. Raises CheckpointError."""
        self._folder = folder
        with self._writing("ab"):  # make what is missing
            content = (folder / "entries").read_bytes()
        self._entries = np.frombuffer(content[: len(content) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
        chosen = self._entries["chosen"].astype(np.int64) + self._entries["tokens"] - self._entries["answer"]
        self._tokens = np.r_[0, np.cumsum(self._entries["tokens"], dtype=np.int64)]  # before each text, and of all
        self._rows = np.r_[0, np.cumsum(chosen)]
        ends = {
            "tokens": 4 * int(self._tokens[-1]),
            "ids": 4 * TOP * int(self._rows[-1]),
            "logprobs": 2 * TOP * int(self._rows[-1]),
            "entries": _ENTRY.itemsize * len(self._entries),
        }
        with self._writing("r+b") as files:
            for name, end in ends.items():
                files[name].truncate(end)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def chosen(self) -> int:
        """Tokens that the target chose, in all texts."""
        return int(self._rows[-1])

    @property
    def last_seed(self) -> int:
        """The largest seed of a text; 0 without any."""
        return int(self._entries["seed"].max(initial=0))

    def add(self, answer: TargetAnswer) -> None:
        """Append a text. Raises CheckpointError when the disk is full; all earlier texts are intact then."""
        assert answer.ids.shape == answer.logprobs.shape == (len(answer.chosen), TOP)
        first, last = answer.asked.start, answer.asked.stop
        entry = (len(answer.tokens), first, last - first, answer.answer, answer.temperature, answer.seed)
        parts = {
            "tokens": answer.tokens.astype("<u4"),
            "ids": answer.ids.astype("<u4"),
            "logprobs": answer.logprobs.astype("<f2"),
            "entries": np.array([entry], _ENTRY),
        }
        with self._writing("ab") as files:
            for name, part in parts.items():
                files[name].write(part.tobytes())
                files[name].flush()
        self._entries = np.concatenate([self._entries, parts["entries"]])
        self._tokens = np.append(self._tokens, self._tokens[-1] + len(answer.tokens))
        self._rows = np.append(self._rows, self._rows[-1] + len(answer.ids))

    def clear(self) -> None:
        """Remove all texts. Raises CheckpointError."""
        with self._writing("wb"):
            pass
        self._entries, self._tokens, self._rows = self._entries[:0], self._tokens[:1], self._rows[:1]

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each text."""
        found: NDArray[np.int64] = np.diff(self._tokens)
        return found

    def tokens(self, number: int) -> NDArray[np.uint32]:
        """Return the ids of a text."""
        return self._part("tokens", "<u4", int(self._tokens[number]), int(self._entries[number]["tokens"]))

    def read(self, number: int) -> TargetAnswer:
        """Return a text."""
        it, tokens = self._entries[number], self.tokens(number)
        first, count = int(self._rows[number]), int(self._rows[number + 1] - self._rows[number])
        ids = self._part("ids", "<u4", first * TOP, count * TOP).reshape(count, TOP)
        logprobs = self._part("logprobs", "<f2", first * TOP, count * TOP).reshape(count, TOP)
        asked = slice(int(it["asked"]), int(it["asked"] + it["chosen"]))
        return TargetAnswer(tokens, asked, int(it["answer"]), float(it["temperature"]), int(it["seed"]), ids, logprobs)

    @contextmanager
    def _writing(self, mode: str) -> Iterator[dict[str, IO[bytes]]]:
        """Yield the files, opened. Raises CheckpointError for a folder or a disk that takes nothing."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                yield {name: stack.enter_context((self._folder / name).open(mode)) for name in NAMES}
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: cannot be written: {error.strerror}; make room there, and run the same command again"
            ) from None

    def _part(self, name: str, kind: str, first: int, count: int) -> NDArray[Any]:
        found: NDArray[Any] = np.fromfile(self._folder / name, kind, count, offset=first * np.dtype(kind).itemsize)
        return found
