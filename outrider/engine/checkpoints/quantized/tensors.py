"""Weights whose codes, scales and zeros are tensors of their own, read as rows of blocks.

The layouts are those of AWQ (arXiv 2306.00978) as AutoAWQ's gemm has them, GPTQ (arXiv 2210.17323) as AutoGPTQ and
GPTQModel do, compressed-tensors, fine-grained FP8 (arXiv 2412.19437, section 3.3), NVFP4, and MXFP4 (OCP Microscaling
Formats, 1.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.files import Content
from outrider.engine.checkpoints.quantized.blocks import (
    Bytes,
    Floats,
    fitting,
    float8_blocks,
    integer_blocks,
    mxfp4_blocks,
    nvfp4_blocks,
    unpacked,
)
from outrider.engine.checkpoints.quantized.method import Method
from outrider.engine.checkpoints.stored_tensors import StoredTensor, TensorSource, as_float32
from outrider.errors import CheckpointError

_WORDS = "I32"
_FLOATS = ("F32", "F16", "BF16")
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each code of a word, from the lowest bits on
_TYPES = {"I32": np.int32, "I64": np.int64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8}
_SUFFIXES = ("qweight", "weight_packed", "weight")  # of the tensor that has the codes

Rows = Callable[[int, int], Bytes]


class QuantizedTensor(NamedTuple):
    """A weight in blocks that are made when they are read: a `TensorSource`."""

    file: Content
    kind: str
    shape: tuple[int, ...]
    bytes: int  # of all its parts
    blocks: Rows
    order: NDArray[np.int32] | None = None

    @property
    def dtype(self) -> str:
        """The name of its type as files have it."""
        return self.kind.upper()

    def read(self, first: int, last: int) -> Bytes:
        """Return the blocks of rows [first, last). Raises CheckpointError."""
        return self.blocks(first, last).reshape(-1)


def with_quantized(stored: Mapping[str, StoredTensor], method: Method) -> dict[str, TensorSource]:
    """Return the tensors with those that are quantized as one each, NAME.weight. Raises CheckpointError."""
    found: dict[str, TensorSource] = {}
    for name, tensor in stored.items():
        stem, _, suffix = name.rpartition(".")
        if suffix in _SUFFIXES and (made := _quantized(_Parts(stem, stored), suffix, method)):
            found[f"{stem}.weight"] = made
        else:
            found.setdefault(name, tensor)
    return found


class _Parts:
    """The tensors of one weight."""

    def __init__(self, stem: str, stored: Mapping[str, StoredTensor]) -> None:
        self.stem = stem
        self._stored = stored

    def get(self, *suffixes: str) -> StoredTensor | None:
        """Return the tensor with the first of these suffixes; None: the weight has none of them."""
        return next((it for name in suffixes if (it := self._stored.get(f"{self.stem}.{name}"))), None)

    def need(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
        """Return a tensor, with one of these types and shapes; no shapes: any. Raises CheckpointError."""
        if (it := self.get(suffix)) is None:
            raise self.wrong(f"tensor {self.stem}.{suffix} is missing; download the checkpoint again")
        if it.dtype not in dtypes or (shapes and it.shape not in shapes):
            allowed = " or ".join(str([*shape]) for shape in shapes) or "any"
            raise self.wrong(
                f"tensor {self.stem}.{suffix} is {it.dtype} of shape {[*it.shape]}, must be {' or '.join(dtypes)} of "
                f"shape {allowed}"
            )
        return it

    def wrong(self, what: str) -> CheckpointError:
        """Return an error of this weight."""
        at = self.get(*_SUFFIXES)
        assert at is not None
        return CheckpointError(f"{at.file.path}: {what}")

    def matrix(self, suffix: str, dtype: str) -> StoredTensor:
        """Return a tensor of that type that is a matrix. Raises CheckpointError."""
        it = self.need(suffix, (dtype,))
        if len(it.shape) != 2 or not all(it.shape):
            raise self.wrong(f"tensor {self.stem}.{suffix} has shape {[*it.shape]}, must be a matrix")
        return it

    def fitting(self, name: str, inputs: int, group: int) -> str:
        """Return the type of blocks for these groups, see `blocks.fitting`. Raises CheckpointError where none fits."""
        if (kind := fitting(name, inputs, group)) is None:
            raise self.odd_groups(inputs)
        return kind

    def odd_groups(self, inputs: int) -> CheckpointError:
        """Return the error of groups that no blocks fit."""
        return self.wrong(f"{self.stem} has {inputs} inputs in groups that are no multiples of 32 of them")

    def check_numbers(self, suffix: str, found: Bytes) -> Bytes:
        """Return numbers in E4M3. Raises CheckpointError where one is none."""
        if ((found & np.uint8(127)) == 127).any():
            raise self.wrong(f"tensor {self.stem}.{suffix} has values that are no numbers; download it again")
        return found

    def made(
        self, kind: str, shape: tuple[int, int], rows: Rows, order: NDArray[np.int32] | None = None
    ) -> QuantizedTensor:
        """Return the weight."""
        own = [it for name, it in self._stored.items() if name.rpartition(".")[0] == self.stem]
        return QuantizedTensor(own[0].file, kind, shape, sum(it.bytes for it in own), rows, order)


def _quantized(parts: _Parts, suffix: str, method: Method) -> QuantizedTensor | None:
    """Return a weight by the tensors that it has; None: it is not quantized."""
    it = parts.get(suffix)
    assert it is not None
    if suffix == "qweight":
        return _awq(parts) if method.name == "awq" else _gptq(parts, method)
    if suffix == "weight_packed":
        return _packed(parts) if it.dtype == _WORDS else _float4(parts, suffix)
    if it.dtype == "F8_E4M3":
        return _float8(parts)
    if it.dtype == "I8" and parts.get("weight_scale"):
        return _int8(parts)
    return _float4(parts, suffix) if it.dtype == "U8" and parts.get("weight_scale") else None


def _array(it: StoredTensor, first: int = 0, last: int | None = None) -> NDArray[Any]:
    """Return rows [first, last) of a tensor; of 8 bits and floating as bytes."""
    rows = it.shape[0] if it.shape else 1
    content = np.ascontiguousarray(it.read(first, rows if last is None else last))
    return content.view(_TYPES.get(it.dtype, np.uint8)).reshape(-1, *it.shape[1:])


def _scales(it: StoredTensor, first: int = 0, last: int | None = None) -> Floats:
    return np.ascontiguousarray(as_float32(_array(it, first, last)))


def _in_words(it: StoredTensor) -> Bytes:
    """Return the bytes of words: [..., 4]."""
    return _array(it).view(np.uint8).reshape(*it.shape, 4)


def _order(parts: _Parts, suffix: str, inputs: int, groups: int) -> NDArray[np.int32] | None:
    """Return the inputs sorted by their groups; None: they are already."""
    if parts.get(suffix) is None:
        return None
    of = _array(parts.need(suffix, (_WORDS,), (inputs,)))
    order = np.argsort(of, kind="stable").astype(np.int32)
    if not np.array_equal(of[order], np.arange(inputs) // (inputs // groups)):
        raise parts.wrong(f"tensor {parts.stem}.{suffix} has groups of different sizes; quantize with static groups")
    return None if np.array_equal(order, np.arange(inputs)) else order


def _awq(parts: _Parts) -> QuantizedTensor:
    """Eight outputs of an input are a word, in the order of `_AWQ`."""
    codes = parts.need("qweight", (_WORDS,))
    scales = parts.need("scales", _FLOATS)
    if len(codes.shape) != 2 or len(scales.shape) != 2 or not scales.shape[0] or codes.shape[0] % scales.shape[0]:
        raise parts.wrong(f"{parts.stem}: qweight and scales do not fit one another; download the checkpoint again")
    inputs, outputs, groups = codes.shape[0], 8 * codes.shape[1], scales.shape[0]
    parts.need("scales", _FLOATS, (groups, outputs))
    zeros = parts.need("qzeros", (_WORDS,), (groups, codes.shape[1]))
    group = inputs // groups
    kind = parts.fitting("int4", inputs, group)

    def outputs_of(it: StoredTensor, first: int, last: int) -> Bytes:
        """Return the codes of outputs: [outputs, rows of the tensor]."""
        begin, end = first // 8, -(-last // 8)
        words = np.ascontiguousarray(_array(it)[:, begin:end].T).view(np.uint8).reshape(end - begin, -1, 4)
        found = np.empty((end - begin, 8, words.shape[1]), np.uint8)
        for code, output in enumerate(_AWQ):
            packed = words[..., code // 2]
            found[:, output] = packed >> np.uint8(4) if code % 2 else packed & np.uint8(15)
        return found.reshape(-1, words.shape[1])[first - 8 * begin : last - 8 * begin]

    def rows(first: int, last: int) -> Bytes:
        found = np.ascontiguousarray(_scales(scales).T[first:last])
        zero = outputs_of(zeros, first, last).astype(np.int16)
        return integer_blocks(kind, outputs_of(codes, first, last), found, zero, group)

    return parts.made(kind, (outputs, inputs), rows)


def _gptq(parts: _Parts, method: Method) -> QuantizedTensor:
    """Several inputs of an output are a word, and several zeros of a group."""
    each = 32 // method.bits
    codes = parts.need("qweight", (_WORDS,))
    scales = parts.need("scales", _FLOATS)
    if len(codes.shape) != 2 or not scales.shape or not scales.shape[0] or each * codes.shape[0] % scales.shape[0]:
        raise parts.wrong(f"{parts.stem}: qweight and scales do not fit one another; download the checkpoint again")
    inputs, outputs, groups = each * codes.shape[0], codes.shape[1], scales.shape[0]
    parts.need("scales", _FLOATS, (groups, outputs))
    zeros = parts.need("qzeros", (_WORDS,), (groups, outputs // each))
    group, order = inputs // groups, _order(parts, "g_idx", inputs, groups)
    kind = parts.fitting(f"int{method.bits}", inputs, group)

    def rows(first: int, last: int) -> Bytes:
        words = np.ascontiguousarray(_in_words(codes)[:, first:last].swapaxes(0, 1))
        found = unpacked(words, method.bits).reshape(last - first, inputs)
        zero = unpacked(_in_words(zeros), method.bits).reshape(groups, outputs).T[first:last].astype(np.int16)
        if (zero := zero + np.int16(method.below)).max(initial=0) > 255:
            raise parts.wrong(f"tensor {parts.stem}.qzeros has zeros beyond the codes; download the checkpoint again")
        scale = np.ascontiguousarray(_scales(scales).T[first:last])
        return integer_blocks(kind, found if order is None else found[:, order], scale, zero, group)

    return parts.made(kind, (outputs, inputs), rows, order)


def _packed(parts: _Parts) -> QuantizedTensor:
    """compressed-tensors' pack-quantized: several inputs of an output are a word, and zeros of several outputs."""
    codes = parts.need("weight_packed", (_WORDS,))
    stated = _array(parts.need("weight_shape", ("I64", _WORDS), (2,)))
    outputs, inputs = int(stated[0]), int(stated[1])
    words = codes.shape[1] if len(codes.shape) == 2 else 0
    bits = 32 * words // inputs if inputs > 0 else 0
    if codes.shape != (outputs, words) or bits not in (4, 8) or 32 * words != bits * inputs:
        raise parts.wrong(
            f"{parts.stem}: weight_packed has shape {[*codes.shape]} for a weight of shape {[outputs, inputs]}; codes "
            "of 4 and of 8 bits are served, without padding"
        )
    scales, groups, group = _grouped(parts, outputs, inputs)
    zeros = parts.get("weight_zero_point")
    each = 32 // bits
    if zeros is not None:
        parts.need("weight_zero_point", (_WORDS,), (-(-outputs // each), groups))
    order = _order(parts, "weight_g_idx", inputs, groups)
    kind = parts.fitting(f"int{bits}", inputs, group)

    def rows(first: int, last: int) -> Bytes:
        packed = _array(codes, first, last).view(np.uint8).reshape(last - first, -1)
        found = unpacked(packed, bits)
        zero = np.full((last - first, groups), 1 << bits - 1, np.int16)
        if zeros is not None:
            by_output = unpacked(_in_words(zeros), bits).swapaxes(1, 2).reshape(-1, groups)
            zero = by_output[first:last].astype(np.int16)
        scale = _scales(scales, first, last)
        return integer_blocks(kind, found if order is None else found[:, order], scale, zero, group)

    return parts.made(kind, (outputs, inputs), rows, order)


def _grouped(parts: _Parts, outputs: int, inputs: int) -> tuple[StoredTensor, int, int]:
    """Return the scales of a weight, by output and group, their number for each output, and the inputs of a group."""
    scales = parts.need("weight_scale", _FLOATS)
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    if scales.shape != (outputs, groups) or not groups or inputs % groups:
        raise parts.wrong(
            f"tensor {parts.stem}.weight_scale has shape {[*scales.shape]} for a weight of shape {[outputs, inputs]}"
        )
    return scales, groups, inputs // groups


def _int8(parts: _Parts) -> QuantizedTensor:
    """compressed-tensors' int-quantized."""
    codes = parts.matrix("weight", "I8")
    outputs, inputs = codes.shape
    scales, groups, group = _grouped(parts, outputs, inputs)
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        parts.need("weight_zero_point", ("I8",), (outputs, groups))
    kind = parts.fitting("int8", inputs, group)

    def rows(first: int, last: int) -> Bytes:
        zero = np.zeros((last - first, groups), np.int16) if zeros is None else _array(zeros, first, last)
        found = _array(codes, first, last).view(np.uint8) ^ np.uint8(128)
        return integer_blocks(kind, found, _scales(scales, first, last), zero + np.int16(128), group)

    return parts.made(kind, (outputs, inputs), rows)


def _float8(parts: _Parts) -> QuantizedTensor:
    """Numbers in E4M3, with a scale for the tensor, each output or each block of outputs and inputs."""
    codes = parts.matrix("weight", "F8_E4M3")
    outputs, inputs = codes.shape
    suffix = "weight_scale" if parts.get("weight_scale") else "weight_scale_inv"
    scales = parts.need(suffix, _FLOATS)
    by = scales.shape if len(scales.shape) == 2 else (*scales.shape, 1, 1)[:2]  # of a tensor, of outputs
    height, width = (outputs, inputs) if by == (1, 1) else (1, inputs) if by == (outputs, 1) else (128, 128)
    if by != (-(-outputs // height), -(-inputs // width)):
        raise parts.wrong(
            f"tensor {parts.stem}.{suffix} has shape {[*scales.shape]} for a weight of shape {[outputs, inputs]}; one "
            "for the tensor, for each output, or for each block of 128 x 128 are served"
        )
    kind = parts.fitting("fp8", inputs, width)

    def rows(first: int, last: int) -> Bytes:
        found = parts.check_numbers("weight", _array(codes, first, last))
        scale = _scales(scales).reshape(by)[np.arange(first, last) // height]
        return float8_blocks(kind, found, np.ascontiguousarray(scale), width)

    return parts.made(kind, (outputs, inputs), rows)


def _float4(parts: _Parts, suffix: str) -> QuantizedTensor:
    """Pairs of numbers in E2M1, with a scale for each 16 inputs (NVFP4) or a power of two for each 32 (MXFP4)."""
    codes = parts.matrix(suffix, "U8")
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    powers = parts.need("weight_scale", ("F8_E4M3", "U8")).dtype == "U8"
    scales = parts.need("weight_scale", ("U8" if powers else "F8_E4M3",), (outputs, inputs // (32 if powers else 16)))
    if powers:
        if inputs % 32:
            raise parts.odd_groups(inputs)

        def in_powers(first: int, last: int) -> Bytes:
            return mxfp4_blocks(unpacked(_array(codes, first, last), 4), _array(scales, first, last))

        return parts.made("mxfp4", (outputs, inputs), in_powers)
    divided = parts.get("weight_global_scale") is not None  # the scales are multiples of it; of others, it is of them
    total = parts.need("weight_global_scale" if divided else "weight_scale_2", ("F32",), (1,), ())
    factor = np.float32(_scales(total).reshape(())[()])
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.float32(1) / factor if divided else factor
    kind = parts.fitting("nvfp4", inputs, inputs)

    def rows(first: int, last: int) -> Bytes:
        found = parts.check_numbers("weight_scale", _array(scales, first, last))
        return nvfp4_blocks(kind, unpacked(_array(codes, first, last), 4), found, factor)

    return parts.made(kind, (outputs, inputs), rows)
