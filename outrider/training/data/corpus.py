"""Tokenized texts, in two memory-mapped files that are reused as long as the texts and the tokenizer do not change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.core.session.digest import tokenizer_digest
from outrider.engine.checkpoints.checkpoint import read_json
from outrider.errors import CheckpointError, ConfigError
from outrider.training.data.texts import TrainingText, TrainingTexts
from outrider.training.saving.atomic_save import replaced

BATCH = 4 << 20  # characters that are tokenized together
PIECE = 1 << 20  # characters of a long text that are tokenized at once

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 where the vocabulary allows, else uint32
OnProgress = Callable[[str, float], None]  # receives the current activity and its progress, 0 to 1


@dataclass(frozen=True, slots=True)
class Corpus:
    """The token ids of a training's texts."""

    train: Ids
    held_out: Ids
    digest: str  # of the texts
    skipped: int  # texts that were not UTF-8

    def require(self, length: int) -> None:
        """Raise ConfigError if either part has fewer than `length` tokens."""
        for part, what in ((self.train, "to learn from"), (self.held_out, "held out")):
            if len(part) < length:
                raise ConfigError(
                    f"text: {len(part):,} tokens are {what}, and one window takes {length:,}; give more text, or a "
                    "smaller --window" + (", or a larger --held-out" if part is self.held_out else "")
                )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and the separator of texts."""

    tokenizer: Tokenizer
    digest: bytes
    separator: int | None  # id after each text; None: no separator

    @classmethod
    def read(cls, folder: Path, separator: int | None = None) -> Vocabulary:
        """Read a folder's tokenizer.json. The default separator is the end of text in tokenizer_config.json.

        Raises CheckpointError.
        """
        path = folder / "tokenizer.json"
        read_json(path)  # raises a CheckpointError with the reason if the file is not readable JSON
        content = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exceptions
            raise CheckpointError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = folder / "tokenizer_config.json"
        if separator is None and settings.exists():
            end = read_json(settings).get("eos_token")
            separator = tokenizer.token_to_id(end) if isinstance(end, str) else None
        return cls(tokenizer, tokenizer_digest(content), separator)

    @property
    def size(self) -> int:
        """The number of ids; all ids are below it."""
        return int(max(self.tokenizer.get_vocab().values())) + 1


def prepare(texts: TrainingTexts, vocabulary: Vocabulary, folder: Path, on_progress: OnProgress) -> Corpus:
    """Tokenize the texts into a folder, unless it holds their ids already. All texts are read in any case.

    Raises ConfigError for texts as `TrainingTexts` does, and the errors of `replaced` for a full disk.
    """
    on_progress("reading texts", 0.0)
    digest = texts.digest()
    known = {"texts": digest, "tokenizer": vocabulary.digest.hex(), "separator": vocabulary.separator}
    skipped = texts.skipped
    if _read(folder / "corpus.json") != known:
        with replaced(folder) as fresh:
            _tokenize(texts, vocabulary, fresh, on_progress)
            (fresh / "corpus.json").write_text(json.dumps(known), encoding="utf-8")
    kind = _kind(vocabulary)
    return Corpus(_mapped(folder / "train.ids", kind), _mapped(folder / "held_out.ids", kind), digest, skipped)


def _tokenize(texts: TrainingTexts, vocabulary: Vocabulary, folder: Path, on_progress: OnProgress) -> None:
    files = len(texts)
    names: set[str] = set()
    with (folder / "train.ids").open("wb") as train, (folder / "held_out.ids").open("wb") as held_out:
        for batch in _batches(texts):
            _write(batch, vocabulary, train, held_out)
            names.update(text.name.partition(":")[0] for text in batch)
            on_progress("tokenizing texts", min(1.0, len(names) / files))


def _write(batch: list[TrainingText], vocabulary: Vocabulary, train: BinaryIO, held_out: BinaryIO) -> None:
    kind, separator = _kind(vocabulary), vocabulary.separator
    pieces = [(text, piece, last) for text in batch for piece, last in _pieces(text.content)]
    coded = vocabulary.tokenizer.encode_batch([piece for _, piece, _ in pieces], add_special_tokens=False)
    for (text, _, last), encoding in zip(pieces, coded, strict=True):
        end = [separator] if last and separator is not None else []
        (held_out if text.held_out else train).write(np.array(encoding.ids + end, kind).tobytes())


def _batches(texts: TrainingTexts) -> Iterator[list[TrainingText]]:
    batch: list[TrainingText] = []
    for text in texts:
        batch.append(text)
        if sum(len(each.content) for each in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _pieces(content: str) -> Iterator[tuple[str, bool]]:
    """Split a text into pieces that end at line ends where lines are short enough. Yield (piece, is the last one)."""
    first = 0
    while len(content) - first > PIECE:
        end = content.rfind("\n", first, first + PIECE) + 1
        end = end if end > first else first + PIECE
        yield content[first:end], False
        first = end
    yield content[first:], True


def _kind(vocabulary: Vocabulary) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocabulary.size <= 1 << 16 else np.uint32


def _mapped(path: Path, kind: type[np.uint16] | type[np.uint32]) -> Ids:
    mapped: Ids = np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)
    return mapped


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON of a file, None if it is missing or damaged; then the texts are tokenized again."""
    try:
        return read_json(path)
    except CheckpointError:
        return None
