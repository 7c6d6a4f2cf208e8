"""The tensors of a checkpoint's files, and where they are in those of safetensors format.

Such a file is 8 bytes with the length of a header, the header in JSON, and the data.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.block_types import IN_BLOCKS, TYPES, check_served, dequantize
from outrider.engine.checkpoints.files import CheckpointFile, Content
from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # bfloat16 as its bits
ALL = slice(None)

_BITS = {  # of a number, by the type's name in the format
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_MOST_HEADER = 16 << 20  # bytes: some 100,000 tensors
_MOST_SIZE, _MOST_DIMENSIONS = 1 << 48, 16  # of a tensor
_AT_A_TIME = 1 << 20  # values that are dequantized at a time


class TensorSource(Protocol):
    """A tensor that can be read from its file, or from several parts there.

    `file`: the one that errors name; `dtype`, `kind`: the name of its type in upper and in lower case; `bytes`: those
    that are read for all of it; `order`: the input of each column of a matrix, None where they are in order.
    """

    @property
    def file(self) -> Content: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def order(self) -> NDArray[np.int32] | None: ...

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of rows [first, last); a scalar is one row. Raises CheckpointError."""


class Kinded(Protocol):
    """A tensor's type and shape."""

    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def main_kind(tensors: Iterable[Kinded]) -> str:
    """Return the type of most values of some tensors; see `StoredTensors.kind`."""
    values = Counter[str]()
    for it in tensors:
        values[it.kind] += math.prod(it.shape)
    return max(values, key=values.__getitem__, default="f32")


class ArraySource(Protocol):
    """Tensors of a model, by name; see `StoredTensors.array`."""

    def array(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[Any]: ...


class FileRows(NamedTuple):
    """Rows of a matrix in an open file."""

    descriptor: int
    start: int  # byte where they begin
    rows: int
    row_bytes: int
    pairs: int  # see `StoredTensor`


class StoredTensors:
    """The tensors of some files. Memory holds only those that a caller keeps."""

    def __init__(
        self,
        stored: Mapping[str, TensorSource],
        listed_in: Path,
        progress: Callable[[float], None] | None = None,
        sizes_in: str = "config.json",
    ) -> None:
        """`listed_in`: the file that errors name where a tensor is missing; `sizes_in`: what has the model's sizes;
        `progress`: is called with the fraction of bytes read.
        """
        self._stored = stored
        self._listed_in = listed_in
        self._sizes_in = sizes_in
        self._progress = progress
        self._taken = 0
        self._total = sum({it.file.path: it.file.size for it in stored.values()}.values())

    @property
    def files(self) -> dict[str, Path]:
        """The file of each tensor, by its name."""
        return {name: stored.file.path for name, stored in self._stored.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is one of `files`."""
        return self._stored[name].shape

    def finish(self) -> None:
        """Call `progress` with 1: the bytes that were not read are headers and unused tensors."""
        if self._progress is not None:
            self._progress(1.0)

    def _count(self, stored: TensorSource) -> None:
        self._taken += stored.bytes
        if self._progress is not None:
            self._progress(min(1.0, self._taken / self._total))

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor as `array` does, for torch."""
        return as_tensor(self.array(name, *shape, rows=rows, columns=columns))

    def array(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[Any]:
        """Return a tensor of that shape as it is stored, bfloat16 as uint16, or only a part of it.

        Quantized values become float32. Raises CheckpointError when the tensor is missing or has another shape, and
        when its file has changed.
        """
        stored = self.check(name, *shape)
        part = range(shape[0] if shape else 1)[rows]
        if stored.kind in IN_BLOCKS:
            array = _dequantized(stored, part)[:, columns]
        else:
            dtype = np.dtype(STORED[stored.dtype])
            content = stored.read(*((part.start, part.stop) if part else (0, 0)))
            if content.ctypes.data % dtype.itemsize:
                content = content.copy()
            array = content.view(dtype)
            if len(shape) > 1:
                array = array.reshape(len(part), *shape[1:])[:, columns]
        self._count(stored)
        return array if shape else array.reshape(())

    def kind(self, name: str) -> str:
        """Return the name of a tensor's type in lower case, as "bf16" and "q4_k"; the tensor is one of `files`."""
        return self._stored[name].kind

    @property
    def main_kind(self) -> str:
        """The type of most values; see `kind`."""
        return main_kind(self._stored.values())

    def blocks(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[np.uint8]:
        """Return a quantized matrix of that shape, or a part of it, as its blocks: [rows, bytes of a row].

        Their columns are in the matrix's `order`. Raises CheckpointError as `array`, and where `columns` are no whole
        blocks.
        """
        stored = self.check(name, *shape)
        if stored.kind not in IN_BLOCKS:
            raise ValueError(f"{name} is {stored.kind}, and has no blocks")
        block = TYPES[stored.kind]
        part, wanted = range(shape[0])[rows], range(shape[-1])[columns]
        if stored.order is not None and len(wanted) != shape[-1]:
            raise CheckpointError(
                f"{stored.file.path}: ranks cannot share tensor {name}, whose inputs are sorted by their groups "
                "(desc_act): let one rank have the model, or take a checkpoint without"
            )
        if wanted.start % block.values or wanted.stop % block.values:
            raise CheckpointError(
                f"{stored.file.path}: tensor {name} cannot be divided at columns {wanted.start} and {wanted.stop}: it "
                f"is {stored.kind}, in blocks of {block.values}; let fewer ranks share the model"
            )
        content = stored.read(*((part.start, part.stop) if part else (0, 0))).reshape(len(part), -1)
        self._count(stored)
        return content[:, block.row_bytes(wanted.start) : block.row_bytes(wanted.stop)]

    @contextmanager
    def in_file(self, name: str, *shape: int, rows: slice = ALL) -> Iterator[FileRows | None]:
        """Yield where a file has rows of a matrix of that shape; None: nowhere as they are needed.

        Raises CheckpointError as `array`.
        """
        stored = self.check(name, *shape)
        part = range(shape[0])[rows]
        if not isinstance(stored, StoredTensor) or not isinstance(stored.file, CheckpointFile) or len(shape) != 2:
            yield None
            return
        head = 2 * stored.pairs or 1
        if part.start % head or part.stop % head:
            yield None
            return
        each = stored.bytes // max(1, shape[0])
        with stored.file.opened() as file:
            yield FileRows(file, stored.start + part.start * each, len(part), each, stored.pairs)
        self._count(stored)

    def order(self, name: str) -> NDArray[np.int32] | None:
        """Return the input of each column of a matrix's blocks; None: they are in order. It is one of `files`."""
        return self._stored[name].order

    def check(self, name: str, *shape: int) -> TensorSource:
        """Return where a tensor is. Raises CheckpointError when it is missing or has another shape or type."""
        if name not in self._stored:
            raise CheckpointError(f"{self._listed_in}: tensor {name} is missing; download the checkpoint again")
        stored = self._stored[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file.path}: tensor {name} has shape {list(stored.shape)}, {self._sizes_in} makes it "
                f"{list(shape)}; the two must belong together"
            )
        if stored.kind in IN_BLOCKS and len(shape) != 2:
            raise CheckpointError(f"{stored.file.path}: tensor {name} is {stored.kind}, must be f32: it is no matrix")
        if stored.dtype not in STORED and stored.kind not in IN_BLOCKS:
            if stored.kind in TYPES and not TYPES[stored.kind].plain:
                check_served(stored.kind, f"{stored.file.path}: tensor {name}")
            kind = stored.dtype.lower().replace("i", "int").replace("f", "float")
            raise CheckpointError(f"{stored.file.path}: tensor {name} is {kind}, must be bfloat16, float16 or float32")
        return stored

    def row_bytes(self, name: str) -> tuple[str, tuple[int, ...], list[bytes]]:
        """Return the type, the shape and the bytes of the first, middle and last row of a tensor of any type.

        Type and shape are as the file names them. Raises CheckpointError.
        """
        stored = self._stored[name]
        shape = stored.shape
        rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else []
        return stored.dtype, shape, [stored.read(row, row + 1).tobytes() for row in rows]


class StoredTensor(NamedTuple):
    """The place of a tensor in its file."""

    file: Content
    dtype: str  # as the format names it, in upper case
    shape: tuple[int, ...]
    start: int  # its bytes in the file are [start, stop)
    stop: int
    pairs: int = 0  # of the rows of a head, if the two rows of a pair are neighbours in the file; else 0

    @property
    def kind(self) -> str:
        """The name of its type in lower case."""
        return self.dtype.lower()

    @property
    def bytes(self) -> int:
        """Its bytes in the file."""
        return self.stop - self.start

    @property
    def order(self) -> None:
        """Its columns are in order."""

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of rows [first, last); a scalar is one row. Raises CheckpointError.

        Rows of pairs are in the order of checkpoints: the first ones of a head's pairs, then the second ones.
        """
        each = (self.stop - self.start) // max(1, self.shape[0] if self.shape else 1)
        if not self.pairs:
            return self.file.read(self.start + first * each, self.start + last * each)
        head = 2 * self.pairs
        begin, end = first // head * head, -(-last // head) * head
        content = self.file.read(self.start + begin * each, self.start + end * each)
        rows = content.reshape(-1, self.pairs, 2, each).swapaxes(1, 2).reshape(-1, each)
        return rows[first - begin : last - begin].reshape(-1)


def _dequantized(stored: TensorSource, rows: range) -> NDArray[np.float32]:
    """Return the values of a quantized matrix's rows, a few at a time: a block takes more memory on the way."""
    found = np.empty((len(rows), stored.shape[-1]), np.float32)
    if not len(rows):
        return found
    content = stored.read(rows.start, rows.stop).reshape(len(rows), -1)
    columns = ALL if stored.order is None else stored.order
    step = max(1, _AT_A_TIME // stored.shape[-1])
    for first in range(0, len(rows), step):
        found[first : first + step, columns] = dequantize(stored.kind, content[first : first + step])
    return found


def as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return the array in float32; 16-bit integers are the bits of bfloat16."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)


def as_tensor(stored: NDArray[Any]) -> Tensor:
    """Return the array as a tensor over the same memory; 16-bit integers are the bits of bfloat16."""
    import torch

    tensor = torch.from_numpy(stored)
    return tensor.view(torch.bfloat16) if stored.dtype == np.uint16 else tensor


def safetensors_layout(files: Sequence[Content]) -> dict[str, StoredTensor]:
    """Return the tensors of files. Raises CheckpointError."""
    return {name: it for file in files for name, it in _layout(file).items()}


def _layout(file: Content) -> dict[str, StoredTensor]:
    """Return the tensors of a file, which are all of its bytes behind the header. Raises CheckpointError.

    Errors quote nothing of the header: the file may be anybody's.
    """

    def broken(why: str) -> CheckpointError:
        return CheckpointError(f"{file.path}: truncated or corrupt: {why}; download it again")

    length = int.from_bytes(file.read(0, min(8, file.size)).tobytes(), "little")
    if file.size < 8 or length > file.size - 8:
        raise broken("the header does not fit into the file")
    if length > _MOST_HEADER:
        raise broken(f"the header has {length} bytes, must have at most {_MOST_HEADER}")
    try:
        header = json.loads(file.read(8, 8 + length).tobytes())
    except (ValueError, RecursionError):
        raise broken("the header is no JSON") from None
    if not isinstance(header, dict):
        raise broken("the header is no JSON object")
    header.pop("__metadata__", None)
    found: dict[str, StoredTensor] = {}
    for number, (name, it) in enumerate(header.items(), 1):
        if (stored := _stored(file, 8 + length, it)) is None:
            raise broken(f"entry {number} of the header is no tensor's")
        found[name] = stored
    end = 8 + length
    for stored in sorted(found.values(), key=lambda it: (it.start, it.stop)):
        if stored.start != end:
            raise broken("tensors overlap, or leave gaps")
        end = stored.stop
    if end != file.size:
        raise broken(f"the tensors end at byte {end} of {file.size}")
    return found


def _stored(file: Content, data: int, entry: object) -> StoredTensor | None:
    """Return the tensor that an entry of a header describes; None for anything else. `data`: where the first begins."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS or shape is None or offsets is None or len(offsets) != 2:
        return None
    start, stop = offsets
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        return None
    return StoredTensor(file, dtype, shape, data + start, data + stop)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a list of sizes from JSON; None for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return None
    fine = all(isinstance(it, int) and not isinstance(it, bool) and 0 <= it <= _MOST_SIZE for it in value)
    return tuple(value) if fine else None
