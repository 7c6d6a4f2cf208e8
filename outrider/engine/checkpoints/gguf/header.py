"""Reads the headers of GGUF files: their metadata, and where their tensors are. Nothing of a file is trusted."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.block_types import NUMBERS, TYPES
from outrider.engine.checkpoints.files import CheckpointFile, Content
from outrider.errors import CheckpointError
from outrider.hub import gguf_parts, is_gguf

ALIGNMENT = "general.alignment"

_MAGIC = b"GGUF"
_MOST_HEADER = 64 << 20  # bytes; a vocabulary of 262,144 with its merges takes 15 MB
_MOST_STRINGS = 1 << 21  # of all arrays together
_MOST_KEYS, _MOST_TENSORS = 1 << 14, 1 << 16
_MOST_NAME = 1 << 10  # bytes of a key, or of a tensor's name
_MOST_SIZE, _MOST_DIMENSIONS, _MOST_SPLITS = 1 << 48, 4, 1 << 12
_MOST_ALIGNMENT = 1 << 20  # bytes
_FIRST_READ = 1 << 20  # bytes; what follows is read in pieces of twice the size

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1")))  # types of numbers in metadata
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file, and where it is."""

    kind: str  # name of a type, see `block_types`
    shape: tuple[int, ...]  # the columns last
    start: int  # its bytes in the file are [start, stop)
    stop: int
    file: Content


class GgufFile:
    """The header of a GGUF file, or of all files of a model that was split. Memory does not hold the tensors."""

    def __init__(self, path: Path) -> None:
        """Read the headers. `path`: the file, of a split model the first one. Raises CheckpointError."""
        first = _parse(CheckpointFile(path))
        self.path = path
        self.metadata: Mapping[str, Any] = MappingProxyType(first.metadata)  # arrays of numbers are numpy's
        self.tensors: dict[str, GgufTensor] = first.tensors
        self.files: list[CheckpointFile] = [first.file]
        paths = split_paths(path, self.number("split.count", 1, most=_MOST_SPLITS))
        for part, further in enumerate(paths[1:], 1):
            found = _parse(CheckpointFile(further))
            number, of = found.metadata.get("split.no"), found.metadata.get("split.count")
            if not _equal(number, part) or not _equal(of, len(paths)):
                raise CheckpointError(
                    f"{further}: split.no is {number!r:.40} of {of!r:.40}, must be {part} of {len(paths)}; download "
                    "all parts of one model again"
                )
            if twice := self.tensors.keys() & found.tensors:
                raise CheckpointError(f"{further}: has tensor {min(twice)}, as an earlier part has")
            self.tensors |= found.tensors
            self.files.append(found.file)
        total, count = self.metadata.get("split.tensors.count"), len(self.tensors)
        if total is not None and not _equal(total, count):
            raise CheckpointError(
                f"{path}: split.tensors.count is {total!r:.40}, its {len(paths)} parts have {count} tensors; download "
                "all parts again"
            )

    def read(self, name: str, rows: slice = slice(None)) -> NDArray[np.uint8]:
        """Return the bytes of a tensor's rows: [rows, bytes of a row].

        Rows are along the first dimension of `shape`; a tensor of one dimension has a value in each. Raises
        CheckpointError for a tensor that is missing, and when the file has changed.
        """
        if (it := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; download the file again")
        count = it.shape[0] if len(it.shape) > 1 or TYPES[it.kind].plain else 1
        each = (it.stop - it.start) // count
        part = range(count)[rows]
        if part.step != 1:
            raise ValueError(f"rows are {rows}, must follow one another")
        first, last = (part.start, part.stop) if part else (0, 0)
        return it.file.read(it.start + first * each, it.start + last * each).reshape(len(part), each)

    def number(self, key: str, default: int | None = None, *, most: int = 1 << 28) -> int:
        """Return a positive integer of the metadata, for each layer or for all. Raises CheckpointError."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a positive integer")
        if value > most:
            raise self.wrong(key, f"at most {most}")
        return value

    def single(self, key: str) -> int | float | str | None:
        """Return a value of the metadata that is no array; None if there is none. Raises CheckpointError."""
        value: int | float | str | list[str] | NDArray[Any] | None = self.metadata.get(key)
        if isinstance(value, list | np.ndarray):
            raise self.wrong(key, "a single value")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number of the metadata. Raises CheckpointError."""
        value = self.metadata.get(key, default)
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text of the metadata. Raises CheckpointError."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value of the metadata. Raises CheckpointError."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        """Return the error for an entry of the metadata, with what is allowed instead."""
        if key not in self.metadata:
            return CheckpointError(f"{self.path}: metadata lack {key}, which must be {allowed}; convert the model anew")
        value = self.metadata[key]
        shown = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else f"{value!r:.80}"
        return CheckpointError(f"{self.path}: metadata {key} is {shown}, must be {allowed}")


_kept: dict[Path, GgufFile] = {}


def read_gguf(path: Path) -> GgufFile:
    """Return the headers of a file, read anew unless `kept_header` has them. Raises CheckpointError."""
    return _kept.get(path) or GgufFile(path)


@contextmanager
def kept_header(checkpoint: Path) -> Iterator[None]:
    """Have the headers of a GGUF file read once in the body, which asks for several parts of them."""
    if not is_gguf(checkpoint) or checkpoint in _kept:
        yield
        return
    _kept[checkpoint] = GgufFile(checkpoint)
    try:
        yield
    finally:
        del _kept[checkpoint]


def split_paths(path: Path, count: int | None = None) -> list[Path]:
    """Return the files of a model, all parts of one that was split. `count`: what the first says that they are.

    Raises CheckpointError where the name is not that of the first part, or says something else.
    """
    parts = gguf_parts(path)
    if parts is None:
        if count is not None and count > 1:
            raise CheckpointError(
                f"{path}: is the first of {count} parts; name them ...-00001-of-{count:05}.gguf and so on, in one "
                "folder, as their converter does"
            )
        return [path]
    if not 0 < parts.parts <= _MOST_SPLITS or (count is not None and count != parts.parts):
        raise CheckpointError(f"{path}: is one of {count} parts, not of {parts.parts}; download all parts again")
    numbers = range(1, parts.parts + 1)
    paths = [path.with_name(f"{parts.stem}-{number:05}-of-{parts.parts:05}{path.suffix}") for number in numbers]
    if path != paths[0]:
        raise CheckpointError(f"{path}: is part {parts.number} of {parts.parts}; give the first one, {paths[0].name}")
    return paths


class _Header(NamedTuple):
    """What the header of one file has."""

    file: CheckpointFile
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Reader:
    """Reads the values of a header one after another. Errors quote nothing of a file: it may be anybody's."""

    def __init__(self, file: CheckpointFile) -> None:
        self.file = file
        self.at = 0
        self._content = b""
        self._strings = 0

    def broken(self, why: str) -> NoReturn:
        """Raise the error of a broken file."""
        raise CheckpointError(f"{self.file.path}: truncated or corrupt: {why}; download it again")

    def need(self, count: int) -> bytes:
        """Return the content of the file, read as far as `count` bytes from here."""
        stop = self.at + count
        have = len(self._content)
        if stop > have:
            if stop > self.file.size:
                self.broken("the header does not fit into the file")
            if stop > _MOST_HEADER:
                self.broken(f"the header must have at most {_MOST_HEADER} bytes")
            until = min(self.file.size, max(stop, 2 * have, _FIRST_READ))
            self._content += self.file.read(have, until).tobytes()
        return self._content

    def u32(self) -> int:
        """Return the next 32 bits."""
        (value,) = _U32.unpack_from(self.need(4), self.at)
        self.at += 4
        return int(value)

    def u64(self) -> int:
        """Return the next 64 bits."""
        (value,) = _U64.unpack_from(self.need(8), self.at)
        self.at += 8
        return int(value)

    def text(self, what: str, most: int = _MOST_HEADER) -> str:
        """Return the next text."""
        length = self.u64()
        if length > most:
            self.broken(f"{what} has {length} bytes, must have at most {most}")
        content = self.need(length)
        try:
            text = content[self.at : self.at + length].decode()
        except UnicodeDecodeError:
            self.broken(f"{what} is no text in UTF-8")
        self.at += length
        return text

    def value(self, what: str) -> Any:
        """Return the next value with its type before it."""
        kind = self.u32()
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            self.broken(f"{what} is of type {kind}, which the format does not have")
        (number,) = self._numbers(what, kind, 1).tolist()
        return number

    def _array(self, what: str) -> Any:
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return self._texts(what, count)
        if kind == _ARRAY:
            raise CheckpointError(f"{self.file.path}: {what} is an array of arrays, which is not served")
        if kind not in _NUMBERS:
            self.broken(f"{what} is an array of type {kind}, which the format does not have")
        return self._numbers(what, kind, count)

    def _numbers(self, what: str, kind: int, count: int) -> NDArray[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        content = self.need(count * dtype.itemsize)
        values = np.frombuffer(content, dtype, count, self.at)
        self.at += count * dtype.itemsize
        if kind != _BOOL:
            return values.copy()
        if (values > 1).any():
            self.broken(f"{what} is neither true nor false")
        return values.astype(bool)

    def _texts(self, what: str, count: int) -> list[str]:
        self._strings += count
        if self._strings > _MOST_STRINGS:
            self.broken(f"arrays have more than {_MOST_STRINGS} texts")
        self.need(8 * count)  # each has its length at least
        found: list[str] = []
        unpack, content, end = _U64.unpack_from, self._content, len(self._content)
        at = self.at
        for _ in range(count):  # of a vocabulary: the loop that counts
            stop = at + 8
            if stop <= end:
                stop += unpack(content, at)[0]
            if stop > end:
                self.at = at
                self.need(8)
                self.need(8 + unpack(self._content, at)[0])
                content, end = self._content, len(self._content)
                stop = at + 8 + unpack(content, at)[0]
            try:
                found.append(content[at + 8 : stop].decode())
            except UnicodeDecodeError:
                self.broken(f"{what} has an entry that is no text in UTF-8")
            at = stop
        self.at = at
        return found


def _parse(file: CheckpointFile) -> _Header:
    """Read the header of one file. Raises CheckpointError."""
    reader = _Reader(file)
    if file.size < 24 or reader.need(24)[:4] != _MAGIC:
        raise CheckpointError(f"{file.path}: is no GGUF file, or truncated; download it again")
    reader.at = 4
    version = reader.u32()
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise CheckpointError(f"{file.path}: is big-endian; convert it for a little-endian machine")
        raise CheckpointError(f"{file.path}: is GGUF of version {version}, must be of 2 or 3; convert the model anew")
    tensors, keys = reader.u64(), reader.u64()
    if keys > _MOST_KEYS or tensors > _MOST_TENSORS:
        reader.broken(f"it has {keys} keys and {tensors} tensors, may have {_MOST_KEYS} and {_MOST_TENSORS}")
    metadata: dict[str, Any] = {}
    for number in range(1, keys + 1):
        key = reader.text(f"key {number} of the metadata", _MOST_NAME)
        if key in metadata:
            reader.broken(f"key {number} of the metadata is there twice")
        metadata[key] = reader.value(f"value {number} of the metadata")
    alignment = metadata.get(ALIGNMENT, 32)
    if (
        not isinstance(alignment, int)
        or isinstance(alignment, bool)
        or not 0 < alignment <= _MOST_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        reader.broken(f"{ALIGNMENT} must be a power of two up to {_MOST_ALIGNMENT}")
    return _Header(file, metadata, _tensors(reader, tensors, alignment))


def _tensors(reader: _Reader, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors that a header describes, which have to follow one another in the file."""
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for number in range(1, count + 1):
        what = f"tensor {number}"
        name = reader.text(f"the name of {what}", _MOST_NAME)
        if name in entries:
            reader.broken(f"{what} has the name of an earlier one")
        dimensions = reader.u32()
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            reader.broken(f"{what} has {dimensions} dimensions, must have 1 to {_MOST_DIMENSIONS}")
        shape = tuple(reader.u64() for _ in range(dimensions))[::-1]
        kind = reader.u32()
        if kind not in NUMBERS:
            raise CheckpointError(
                f"{reader.file.path}: {what} is of type {kind}, which is not known; take a file in q4_k or q8_0"
            )
        if not all(0 < size <= _MOST_SIZE for size in shape) or math.prod(shape) > _MOST_SIZE:
            reader.broken(f"{what} has a dimension of 0, or is too large")
        it = NUMBERS[kind]
        if shape[-1] % it.values:
            reader.broken(f"rows of {what} are no whole blocks of {it.values} values ({it.name})")
        size = math.prod(shape[:-1]) * it.row_bytes(shape[-1])
        entries[name] = it.name, shape, reader.u64(), size
    data = _aligned(reader.at, alignment)
    end = 0
    found: dict[str, GgufTensor] = {}
    for name, (it_name, shape, offset, size) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        if offset % alignment:
            reader.broken(f"a tensor begins at byte {offset}, no multiple of {alignment}")
        if offset != _aligned(end, alignment):
            reader.broken("tensors overlap, or leave gaps")
        end = offset + size
        found[name] = GgufTensor(it_name, shape, data + offset, data + end, reader.file)
    if found and data + end > reader.file.size:
        reader.broken(f"its tensors end at byte {data + end}, the file at {reader.file.size}")
    return {name: found[name] for name in entries}


def _equal(value: object, number: int) -> bool:
    """Return whether a value of the metadata, of any type, is a number."""
    return isinstance(value, int) and value == number


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
