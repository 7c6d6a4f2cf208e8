"""The tensors of files in safetensors format: 8 bytes with the length of a header, the header in JSON, and the data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.files import Content
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


class StoredTensors:
    """The tensors of some files. Memory holds only those that a caller keeps."""

    def __init__(
        self, files: Sequence[Content], listed_in: Path, progress: Callable[[float], None] | None = None
    ) -> None:
        """Read the headers of all files. Raises CheckpointError.

        `listed_in`: the file that errors name where a tensor is missing; `progress`: is called with the fraction of
        bytes read.
        """
        self._stored: dict[str, _Stored] = {name: it for file in files for name, it in _layout(file).items()}
        self._listed_in = listed_in
        self._progress = progress
        self._taken = 0
        self._total = sum(file.size for file in files)

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

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor as `array` does, for torch."""
        return as_tensor(self.array(name, *shape, rows=rows, columns=columns))

    def array(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> NDArray[Any]:
        """Return a tensor of that shape as it is stored, bfloat16 as uint16, or only a part of it.

        Raises CheckpointError when the tensor is missing or has another shape, and when its file has changed.
        """
        stored = self.check(name, *shape)
        kind = np.dtype(STORED[stored.dtype])
        whole = range(shape[0] if shape else 1)
        part = whole[rows]
        content = stored.read(*((part.start, part.stop) if part else (0, 0)))
        if content.ctypes.data % kind.itemsize:
            content = content.copy()
        array = content.view(kind).reshape(len(part), *shape[1:])[:, columns] if len(shape) > 1 else content.view(kind)
        self._taken += math.prod(shape) * kind.itemsize
        if self._progress is not None:
            self._progress(min(1.0, self._taken / self._total))
        return array if shape else array.reshape(())

    def check(self, name: str, *shape: int) -> _Stored:
        """Return where a tensor is. Raises CheckpointError when it is missing or has another shape or type."""
        if name not in self._stored:
            raise CheckpointError(f"{self._listed_in}: tensor {name} is missing; download the checkpoint again")
        stored = self._stored[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file.path}: tensor {name} has shape {list(stored.shape)}, config.json makes it "
                f"{list(shape)}; the two files must belong together"
            )
        if stored.dtype not in STORED:
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


class _Stored(NamedTuple):
    """The place of a tensor in its file."""

    file: Content
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    start: int  # its bytes in the file are [start, stop)
    stop: int

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of rows [first, last); a scalar is one row. Raises CheckpointError."""
        each = (self.stop - self.start) // max(1, self.shape[0] if self.shape else 1)
        return self.file.read(self.start + first * each, self.start + last * each)


def as_tensor(stored: NDArray[Any]) -> Tensor:
    """Return the array as a tensor over the same memory; 16-bit integers are the bits of bfloat16."""
    import torch

    tensor = torch.from_numpy(stored)
    return tensor.view(torch.bfloat16) if stored.dtype == np.uint16 else tensor


def _layout(file: Content) -> dict[str, _Stored]:
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
    found: dict[str, _Stored] = {}
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


def _stored(file: Content, data: int, entry: object) -> _Stored | None:
    """Return the tensor that an entry of a header describes; None for anything else. `data`: where the first begins."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS or shape is None or offsets is None or len(offsets) != 2:
        return None
    start, stop = offsets
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        return None
    return _Stored(file, dtype, shape, data + start, data + stop)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a list of sizes from JSON; None for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return None
    fine = all(isinstance(it, int) and not isinstance(it, bool) and 0 <= it <= _MOST_SIZE for it in value)
    return tuple(value) if fine else None
