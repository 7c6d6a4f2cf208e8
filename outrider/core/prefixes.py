"""Keys of the beginnings of texts, by which a router finds the verifier that has a prompt's KV already.

A beginning of one of LENGTHS tokens has a key of 32 bits: the CRC of the tenant and the tokens. Where two texts have
the same one by chance, a session is placed as if they began alike, and nothing else comes of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

# 64, 96, 128, 192, ...
LENGTHS = tuple(length for power in range(6, 18) for length in (2**power, 3 * 2 ** (power - 1)))
MOST = 256  # keys that a verifier announces


def prefix_keys(tokens: Sequence[int] | NDArray[np.int64], tenant: str) -> list[int]:
    """The keys of a tenant's text, of the shortest beginning first."""
    data = np.ascontiguousarray(tokens[: LENGTHS[-1]], "<u4").tobytes()
    keys: list[int] = []
    key, begin = crc32(tenant.encode()), 0
    for length in LENGTHS:
        end = length * 4
        if end > len(data):
            break
        key, begin = crc32(data[begin:end], key), end
        keys.append(key)
    return keys


def shared(keys: Sequence[int], held: Collection[int]) -> int:
    """Tokens of a text with those keys that somebody has who holds others'; 0: less than the shortest beginning."""
    return next((length for length, key in reversed([*zip(LENGTHS, keys, strict=False)]) if key in held), 0)


def packed(keys: Iterable[int]) -> str:
    """As an announcement has them."""
    return np.array([*keys], "<u4").tobytes().hex()


@lru_cache(maxsize=1024)  # of all verifiers, as they were announced last
def unpacked(text: str) -> frozenset[int]:
    """From an announcement. There are none in one that is malformed."""
    with suppress(ValueError):
        return frozenset(np.frombuffer(bytes.fromhex(text), "<u4").tolist())
    return frozenset()
