"""Texts as ids of tokens, in two files that are mapped into memory, and kept for as long as the texts are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.core.digest import tokenizer_digest
from outrider.engine.checkpoint import read_json
from outrider.errors import CheckpointError, ConfigError
from outrider.training.saving import replaced
from outrider.training.texts import Text, Texts

BATCH = 4 << 20  # characters that are tokenized together
PIECE = 1 << 20  # characters of a long text that are tokenized at once

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 where the vocabulary allows, else uint32
Heard = Callable[[str, float], None]  # what is being done, and how much of it is: 0 to 1


@dataclass(frozen=True, slots=True)
class Corpus:
    """What there is to learn from."""

    train: Ids
    held_out: Ids
    digest: str  # of the texts
    skipped: int  # texts that were not UTF-8

    def require(self, length: int) -> None:
        """Raises ConfigError where either part is shorter than so many tokens."""
        for part, what in ((self.train, "to learn from"), (self.held_out, "held out")):
            if len(part) < length:
                raise ConfigError(
                    f"text: {len(part):,} tokens are {what}, and one window takes {length:,}; give more text, or a "
                    "smaller --window" + (", or a larger --held-out" if part is self.held_out else "")
                )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How texts become ids."""

    tokenizer: Tokenizer
    digest: bytes
    separator: int | None  # stands behind every text; None: nothing does

    @classmethod
    def read(cls, folder: Path, separator: int | None = None) -> Vocabulary:
        """From a folder's tokenizer.json; without a separator, the end of a text that tokenizer_config.json names.

        Raises CheckpointError.
        """
        path = folder / "tokenizer.json"
        read_json(path)  # says what is wrong with it
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
        """Ids, all below it."""
        return int(max(self.tokenizer.get_vocab().values())) + 1


def prepare(texts: Texts, vocabulary: Vocabulary, folder: Path, heard: Heard) -> Corpus:
    """Tokenizes the texts into a folder, unless it holds them already. All are read in any case, to know it.

    Raises ConfigError for texts as `Texts` does, and what `replaced` raises for a disk that is full.
    """
    heard("reading texts", 0.0)
    digest = texts.digest()
    known = {"texts": digest, "tokenizer": vocabulary.digest.hex(), "separator": vocabulary.separator}
    skipped = texts.skipped
    if _read(folder / "corpus.json") != known:
        with replaced(folder) as fresh:
            _tokenize(texts, vocabulary, fresh, heard)
            (fresh / "corpus.json").write_text(json.dumps(known), encoding="utf-8")
    kind = _kind(vocabulary)
    return Corpus(_mapped(folder / "train.ids", kind), _mapped(folder / "held_out.ids", kind), digest, skipped)


def _tokenize(texts: Texts, vocabulary: Vocabulary, folder: Path, heard: Heard) -> None:
    files = len(texts)
    names: set[str] = set()
    with (folder / "train.ids").open("wb") as train, (folder / "held_out.ids").open("wb") as held_out:
        for batch in _batches(texts):
            _write(batch, vocabulary, train, held_out)
            names.update(text.name.partition(":")[0] for text in batch)
            heard("tokenizing texts", min(1.0, len(names) / files))


def _write(batch: list[Text], vocabulary: Vocabulary, train: BinaryIO, held_out: BinaryIO) -> None:
    kind, separator = _kind(vocabulary), vocabulary.separator
    pieces = [(text, piece, last) for text in batch for piece, last in _pieces(text.content)]
    coded = vocabulary.tokenizer.encode_batch([piece for _, piece, _ in pieces], add_special_tokens=False)
    for (text, _, last), encoding in zip(pieces, coded, strict=True):
        end = [separator] if last and separator is not None else []
        (held_out if text.held_out else train).write(np.array(encoding.ids + end, kind).tobytes())


def _batches(texts: Texts) -> Iterator[list[Text]]:
    batch: list[Text] = []
    for text in texts:
        batch.append(text)
        if sum(len(each.content) for each in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _pieces(content: str) -> Iterator[tuple[str, bool]]:
    """A text in parts of whole lines, as far as lines are short, and whether it is the last one."""
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
    """None where it is missing or broken: the ids are made again."""
    try:
        return read_json(path)
    except CheckpointError:
        return None
