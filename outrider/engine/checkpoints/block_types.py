"""The types of tensors in GGUF files, and of quantized ones on the hub: blocks of a few values with a common scale.

The hub's formats keep codes, scales and zeros as tensors of their own; see `quantized`. In memory they are blocks, too,
of types that no file has: their names end in the values of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class BlockType(NamedTuple):
    """A type of tensors."""

    name: str  # in lower case
    number: int | None  # in GGUF files; None: there are none of it
    values: int  # of a block
    bytes: int  # of a block
    nearest: str = ""  # of a type that is recognised and not served: the served one that is most like it

    @property
    def plain(self) -> bool:
        """Whether each value stands for itself."""
        return self.values == 1

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row, which is a number of whole blocks."""
        return columns // self.values * self.bytes


TYPES = {
    it.name: it
    for it in (
        BlockType("f32", 0, 1, 4),
        BlockType("f16", 1, 1, 2),
        BlockType("q4_0", 2, 32, 18),
        BlockType("q4_1", 3, 32, 20),
        BlockType("q5_0", 6, 32, 22),
        BlockType("q5_1", 7, 32, 24),
        BlockType("q8_0", 8, 32, 34),
        BlockType("q8_1", 9, 32, 40, "q8_0"),
        BlockType("q2_k", 10, 256, 84),
        BlockType("q3_k", 11, 256, 110),
        BlockType("q4_k", 12, 256, 144),
        BlockType("q5_k", 13, 256, 176),
        BlockType("q6_k", 14, 256, 210),
        BlockType("q8_k", 15, 256, 292, "q8_0"),
        BlockType("iq2_xxs", 16, 256, 66, "q2_k"),
        BlockType("iq2_xs", 17, 256, 74, "q2_k"),
        BlockType("iq3_xxs", 18, 256, 98, "q3_k"),
        BlockType("iq1_s", 19, 256, 50, "q2_k"),
        BlockType("iq4_nl", 20, 32, 18),
        BlockType("iq3_s", 21, 256, 110, "q3_k"),
        BlockType("iq2_s", 22, 256, 82, "q2_k"),
        BlockType("iq4_xs", 23, 256, 136),
        BlockType("i8", 24, 1, 1, "q8_0"),
        BlockType("i16", 25, 1, 2, "f32"),
        BlockType("i32", 26, 1, 4, "f32"),
        BlockType("i64", 27, 1, 8, "f32"),
        BlockType("f64", 28, 1, 8, "f32"),
        BlockType("iq1_m", 29, 256, 56, "q2_k"),
        BlockType("bf16", 30, 1, 2),
        BlockType("tq1_0", 34, 256, 54, "q2_k"),
        BlockType("tq2_0", 35, 256, 66, "q2_k"),
        BlockType("mxfp4", 39, 32, 17),
        BlockType("nvfp4", 40, 64, 36, "mxfp4"),
    )
}
NUMBERS = {it.number: it for it in TYPES.values()}
SERVED = tuple(name for name, it in TYPES.items() if not it.nearest)
QUANTIZED = tuple(name for name in SERVED if not TYPES[name].plain)  # of GGUF files
HUB = {
    it.name: it
    for it in (
        # A scale in float32, a byte that is 128 more than the code of zero, and codes.
        BlockType("int4_128", None, 128, 69),
        BlockType("int4_64", None, 64, 37),
        BlockType("int4_32", None, 32, 21),
        BlockType("int8_128", None, 128, 133),
        BlockType("int8_32", None, 32, 37),
        # Half of a factor in float32, a scale in E4M3 for each 16 values, and codes in E2M1.
        BlockType("nvfp4_256", None, 256, 148),
        BlockType("nvfp4_64", None, 64, 40),
        # A scale in float32, and values in E4M3.
        BlockType("fp8_128", None, 128, 132),
        BlockType("fp8_32", None, 32, 36),
    )
}
IN_BLOCKS = (*QUANTIZED, *HUB)
TYPES |= HUB


def check_served(name: str, where: str) -> None:
    """Raise CheckpointError for a type that is not served. `where`: the tensor and its file."""
    if name not in SERVED:
        nearest = TYPES[name].nearest if name in TYPES else "q4_k"
        raise CheckpointError(
            f"{where} is {name}, which is not served; take a file in {nearest}, the nearest that is "
            f"(served are {', '.join(SERVED)})"
        )


def dequantize(name: str, rows: Bytes) -> Floats:
    """Return the values of rows of a served type: [rows, columns] from [rows, bytes of a row].

    The operations on float32 are in the order in which the formats define them, so that other programs have the same
    bits.
    """
    kind = TYPES[name]
    if kind.plain:
        return _PLAIN[name](np.ascontiguousarray(rows))
    blocks = np.ascontiguousarray(rows).reshape(-1, kind.bytes)
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be infinite or NaN, and then values are
        return _BLOCKS[name](blocks).reshape(len(rows), -1)


def _bfloat16(rows: Bytes) -> Floats:
    return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the number in float16 at a byte of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the lower halves of some bytes, and behind them the upper ones: [..., 2 n] from [..., n]."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _fields(packed: Bytes, bits: int) -> Bytes:
    """Return the fields of some bytes from the lowest bits on: [..., 8 / bits, n] from [..., n]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Return the 32 bits at a byte of each block as bits above four others: [blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16)
    return _half(blocks, 0) * values.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16 values of two bits, each with a scale and a minimum of four bits."""
    scales, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 32)
    values = _fields(packed, 2).reshape(-1, 16, 16).astype(np.float32)
    factor = _half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    least = _half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return factor[..., None] * values - least[..., None]


def _q3_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16 values of three bits, each with a signed scale of six bits."""
    upper = _fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    lower = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    values = (lower | upper << np.uint8(2)).astype(np.int8) - np.int8(4)
    scales = _nibbles(blocks[:, 96:104]) | _fields(blocks[:, 104:108], 2).reshape(-1, 16) << np.uint8(4)
    factor = _half(blocks, 108) * (scales.astype(np.int8) - np.int8(32)).astype(np.float32)
    return factor[..., None] * values.astype(np.float32)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """Return the eight scales and eight minima, of six bits each, that are in twelve bytes: [blocks, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & np.uint8(63), third & np.uint8(15) | first >> np.uint8(6) << np.uint8(4)], axis=1)
    least = np.concatenate([second & np.uint8(63), third >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)], axis=1)
    return scales.astype(np.float32), least.astype(np.float32)


def _groups_of_32(blocks: Bytes, values: Bytes) -> Floats:
    """Return eight groups of 32 values, each with a scale and a minimum of six bits."""
    scales, least = _six_bits(blocks[:, 4:16])
    factor, least = _half(blocks, 0) * scales, _half(blocks, 2) * least
    return factor[..., None] * values.reshape(-1, 8, 32).astype(np.float32) - least[..., None]


def _q4_k(blocks: Bytes) -> Floats:
    return _groups_of_32(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: Bytes) -> Floats:
    upper = _fields(blocks[:, 16:48], 1).reshape(-1, 8, 32) << np.uint8(4)
    return _groups_of_32(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | upper)


def _q6_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16 values of six bits, each with a scale of eight bits."""
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    upper = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256) << np.uint8(4)
    values = ((lower | upper).astype(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    factor = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return factor[..., None] * values.astype(np.float32)


_UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the values of E2M1


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _UNEVEN[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    """Eight groups of 32 values of four bits, each with a signed scale of six bits."""
    lower = _fields(blocks[:, 4:8], 4).swapaxes(1, 2).reshape(-1, 8)
    upper = _fields(blocks[:, 2:4], 2).swapaxes(1, 2).reshape(-1, 8)
    scales = (lower | upper << np.uint8(4)).astype(np.int8) - np.int8(32)
    factor = _half(blocks, 0) * scales.astype(np.float32)
    return factor[..., None] * _UNEVEN[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]


def _mxfp4(blocks: Bytes) -> Floats:
    """32 numbers in E2M1 with a power of two, from 2^-127 on, which halves them here."""
    exponents = blocks[:, :1].astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)  # 2^-128 and 2^-127 are subnormal
    halves = np.where(exponents < 2, small, (exponents - np.uint32(1)) << np.uint32(23)).view(np.float32)
    return halves * _FP4[_nibbles(blocks[:, 1:])]


def _float(blocks: Bytes) -> Floats:
    """Return the number in float32 at the begin of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, :4]).view(np.float32)


def _codes(packed: Bytes) -> Bytes:
    """Return codes of four bits, 16 in the lower halves of 16 bytes and 16 in their upper ones: [blocks, 2 n]."""
    return _nibbles(packed.reshape(len(packed), -1, 16)).reshape(len(packed), -1)


def _above_zero(blocks: Bytes, codes: NDArray[np.int16]) -> Floats:
    zero = blocks[:, 4:5].astype(np.int16) - np.int16(128)
    return _float(blocks) * (codes - zero).astype(np.float32)


def _int4(blocks: Bytes) -> Floats:
    return _above_zero(blocks, _codes(blocks[:, 5:]).astype(np.int16))


def _int8(blocks: Bytes) -> Floats:
    return _above_zero(blocks, blocks[:, 5:].view(np.int8).astype(np.int16))


def float8(bits: Bytes) -> Floats:
    """Return numbers in E4M3 (arXiv 2209.05433, section 3), all of whose patterns are finite here."""
    halves = (bits & np.uint8(127)).astype(np.uint16) << np.uint16(7) | (bits & np.uint8(128)).astype(
        np.uint16
    ) << np.uint16(8)
    return halves.view(np.float16).astype(np.float32) * np.float32(256)


def _nvfp4(blocks: Bytes) -> Floats:
    groups = (blocks.shape[1] - 4) // 9
    factor = _float(blocks) * float8(blocks[:, 4 : 4 + groups])
    values = _FP4[_codes(blocks[:, 4 + groups :])].reshape(len(blocks), groups, 16)
    return factor[..., None] * values


def _fp8(blocks: Bytes) -> Floats:
    return _float(blocks) * float8(blocks[:, 4:])


_PLAIN: dict[str, Callable[[Bytes], Floats]] = {
    "f32": lambda rows: rows.view(np.float32),
    "f16": lambda rows: rows.view(np.float16).astype(np.float32),
    "bf16": _bfloat16,
}
_BLOCKS: dict[str, Callable[[Bytes], Floats]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "int4_128": _int4,
    "int4_64": _int4,
    "int4_32": _int4,
    "int8_128": _int8,
    "int8_32": _int8,
    "nvfp4_256": _nvfp4,
    "nvfp4_64": _nvfp4,
    "fp8_128": _fp8,
    "fp8_32": _fp8,
}
