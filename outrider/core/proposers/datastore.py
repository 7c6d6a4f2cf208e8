"""A corpus in one file, for retrieval drafting: its tokens and their suffix array (REST, arXiv 2311.08252).

    header      64 bytes, little-endian: magic, version, bytes a token (2 or 4), digest of the tokenizer,
                vocabulary, tokens, documents; the rest is zero
    tokens      of all documents; after each a separator, whose id is the vocabulary's size; zeros up to a multiple of 8
    suffixes    uint32, the position of every token that is no separator, in the order of the suffixes that begin there

The file is memory-mapped: processes on one machine share its pages, and pages that no search reads are never loaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.proposers.suffix_array import Tokens, sorted_suffixes
from outrider.errors import ConfigError, TokenizerMismatch

MAGIC = b"outrrest"
VERSION = 1
_HEADER = struct.Struct("<8sII16sQQQ8x")
MAX_TOKENS = 2**32 - 1  # with separators


class DatastoreContents(NamedTuple):
    """The contents of a written store."""

    documents: int
    tokens: int  # without separators
    bytes: int  # of the file


@dataclass(frozen=True, slots=True)
class Datastore:
    """An open store. Its arrays are memory-mapped; when the file is replaced, an open store keeps the old contents."""

    path: Path
    vocabulary: int  # number of token ids; a token that is not below it separates documents
    documents: int
    tokens: Tokens  # [tokens and separators]
    suffixes: NDArray[np.uint32]  # [tokens]

    @staticmethod
    def open(path: Path, tokenizer_digest: bytes) -> Datastore:
        """Open a store.

        Raises ConfigError for a file that is missing or no complete store, and TokenizerMismatch for a store whose
        tokens are another tokenizer's.
        """
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; make a store with `outrider index`") from None
        if not header.startswith(MAGIC):
            raise ConfigError(f"{path}: not a store of `outrider index`; give the file that it wrote")
        if len(header) < _HEADER.size:
            raise _broken(path)
        _, version, width, digest, vocabulary, count, documents = _HEADER.unpack(header)
        if version != VERSION:
            raise ConfigError(f"{path}: of version {version}, must be {VERSION}; make it anew with `outrider index`")
        if width != _width(vocabulary) or not 0 < documents < count <= MAX_TOKENS:
            raise _broken(path)
        if digest != tokenizer_digest:
            raise TokenizerMismatch(
                f"{path}: its tokenizer is {digest.hex()}, the model's {tokenizer_digest.hex()}; "
                "make it anew with `outrider index --tokenizer` and the model's folder"
            )
        behind = _suffixes_at(count, width)
        if size != behind + 4 * (count - documents):
            raise _broken(path)
        tokens = np.memmap(path, np.dtype(f"<u{width}"), "r", _HEADER.size, count)
        suffixes = np.memmap(path, np.dtype("<u4"), "r", behind, count - documents)
        return Datastore(path, vocabulary, documents, np.asarray(tokens), np.asarray(suffixes))


def write_datastore(
    path: Path,
    documents: Iterable[Sequence[int]],
    *,
    tokenizer_digest: bytes,
    vocabulary: int,
    progress: Callable[[float], None] = lambda done: None,
) -> DatastoreContents:
    """Write a store of `documents`, each a sequence of token ids; empty ones are left out. The write is atomic.

    The memory needed is that for one document and some million suffixes, however large the corpus is. `progress`
    receives the sorted share of the corpus, 0 to 1. Raises ConfigError when there are no tokens or too many, for a
    token outside the vocabulary, and when the file cannot be written.
    """
    try:
        with _appearing(path) as file:
            return _write(file, path, documents, tokenizer_digest, vocabulary, progress)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); nothing was left behind. "
            "Give a file in a folder that exists and has room: a store takes 6 to 8 bytes a token"
        ) from None


def _write(
    file: IO[bytes],
    path: Path,
    documents: Iterable[Sequence[int]],
    tokenizer_digest: bytes,
    vocabulary: int,
    progress: Callable[[float], None],
) -> DatastoreContents:
    width = _width(vocabulary)
    kind = np.dtype(f"<u{width}")
    file.write(bytes(_HEADER.size))
    count = kept = 0
    for document in documents:
        if not len(document):
            continue
        tokens = np.array(document, dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ConfigError(f"token {tokens.max()} of document {kept} is not in the vocabulary of {vocabulary}")
        count += len(document) + 1
        kept += 1
        if count > MAX_TOKENS:
            raise ConfigError(f"{path}: more than {MAX_TOKENS} tokens; make several stores")
        file.write(np.append(tokens, vocabulary).astype(kind).tobytes())
    if not kept:
        raise ConfigError(f"{path}: there is no text to index; give files that have some")
    file.write(bytes(_suffixes_at(count, width) - _HEADER.size - count * width))
    file.flush()
    text = np.asarray(np.memmap(file.name, kind, "r", _HEADER.size, count))
    done = 0
    for part in sorted_suffixes(text, vocabulary):
        file.write(part.astype("<u4").tobytes())
        done += len(part)
        progress(done / (count - kept))
    size = file.tell()
    file.seek(0)
    file.write(_HEADER.pack(MAGIC, VERSION, width, tokenizer_digest, vocabulary, count, kept))
    return DatastoreContents(kept, count - kept, size)


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that gets its final name once all of it is on the disk, and is deleted on any error."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _width(vocabulary: int) -> int:
    """Return the bytes per token with which the separator also fits."""
    return 2 if vocabulary < 2**16 else 4


def _suffixes_at(count: int, width: int) -> int:
    """Return the offset of the suffixes in the file, in bytes."""
    return _HEADER.size + -(-count * width // 8) * 8


def _broken(path: Path) -> ConfigError:
    return ConfigError(f"{path}: incomplete or damaged; make it anew with `outrider index`")
