"""Makes blocks of codes, scales and zeros; see `block_types.HUB`.

A group is the inputs of an output that share a scale. It is as long as some blocks, or a block's values share one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.block_types import HUB, TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def fitting(name: str, columns: int, group: int) -> str | None:
    """Return the type of the largest blocks that fill rows and groups; None: none does. `name`: as int4."""
    for kind, it in HUB.items():
        if kind.startswith(f"{name}_") and not columns % it.values and (group >= columns or not group % it.values):
            return kind
    return None


def unpacked(packed: Bytes, bits: int) -> Bytes:
    """Return the codes in some bytes, from the lowest bits on: [..., n * 8 / bits] from [..., n]."""
    if bits == 8:
        return packed
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(*packed.shape[:-1], -1)


def integer_blocks(kind: str, codes: Bytes, scales: Floats, zeros: NDArray[np.int16], group: int) -> Bytes:
    """Return blocks of unsigned codes: [rows, bytes of a row] from [rows, columns].

    `scales`, `zeros`: [rows, groups]; `zeros`: the codes of zero, at most 127 of four bits and 255 of eight.
    """
    wide = kind.startswith("int8")
    blocks, at = _blocks(kind, codes.shape, group)
    blocks[..., :4] = scales[:, at, None].view(np.uint8)
    blocks[..., 4] = zeros[:, at] if wide else zeros[:, at] + np.int16(128)
    units = codes.reshape(*blocks.shape[:2], -1)
    blocks[..., 5:] = units ^ np.uint8(128) if wide else _in_halves(units)
    return blocks.reshape(len(codes), -1)


def float8_blocks(kind: str, codes: Bytes, scales: Floats, group: int) -> Bytes:
    """Return blocks of numbers in E4M3: [rows, bytes of a row] from [rows, columns]. `scales`: [rows, groups]."""
    blocks, at = _blocks(kind, codes.shape, group)
    blocks[..., :4] = scales[:, at, None].view(np.uint8)
    blocks[..., 4:] = codes.reshape(*blocks.shape[:2], -1)
    return blocks.reshape(len(codes), -1)


def nvfp4_blocks(kind: str, codes: Bytes, scales: Bytes, factor: np.float32) -> Bytes:
    """Return blocks of numbers in E2M1: [rows, bytes of a row] from [rows, columns].

    `scales`: E4M3, [rows, columns / 16]; `factor`: of all scales.
    """
    blocks, _ = _blocks(kind, codes.shape, codes.shape[1])
    groups = TYPES[kind].values // 16
    blocks[..., :4] = np.float32(factor / 2).reshape(1).view(np.uint8)
    blocks[..., 4 : 4 + groups] = scales.reshape(*blocks.shape[:2], -1)
    blocks[..., 4 + groups :] = _in_halves(codes.reshape(*blocks.shape[:2], -1))
    return blocks.reshape(len(codes), -1)


def mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """Return blocks of numbers in E2M1: [rows, bytes of a row] from [rows, columns].

    `exponents`: [rows, columns / 32].
    """
    blocks, _ = _blocks("mxfp4", codes.shape, codes.shape[1])
    blocks[..., 0] = exponents
    blocks[..., 1:] = _in_halves(codes.reshape(*blocks.shape[:2], -1))
    return blocks.reshape(len(codes), -1)


def _blocks(kind: str, shape: tuple[int, ...], group: int) -> tuple[Bytes, NDArray[np.intp]]:
    """Return memory for blocks, [rows, blocks, bytes], and the group of each block of a row."""
    rows, columns = shape
    it = TYPES[kind]
    count = columns // it.values
    return np.empty((rows, count, it.bytes), np.uint8), np.arange(count) * it.values // group


def _in_halves(codes: Bytes) -> Bytes:
    """Return codes of four bits in bytes: of each 32 the first 16 in the lower halves, the others in the upper ones."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2, 16)
    return (pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)).reshape(*codes.shape[:-1], -1)
