"""Keys of prefixes of texts, with which a router finds the verifier that already holds a prompt's KV.

A prefix of one of the LENGTHS has a key of 32 bits: the CRC of the scope and the prefix's tokens. Where two prefixes
have the same key by chance, a session may be placed on a less suitable verifier; there is no other effect.
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
MAX_KEYS = 256  # keys that a verifier announces at most


def prefix_keys(tokens: Sequence[int] | NDArray[np.int64], scope: str) -> list[int]:
    """Return the keys of the prefixes of a text, the shortest prefix first; `scope`: see `Contract.kv_scope`."""
    data = np.ascontiguousarray(tokens[: LENGTHS[-1]], "<u4").tobytes()
    keys: list[int] = []
    key, begin = crc32(scope.encode()), 0
    for length in LENGTHS:
        end = length * 4
        if end > len(data):
            break
        key, begin = crc32(data[begin:end], key), end
        keys.append(key)
    return keys


def shared_length(keys: Sequence[int], held: Collection[int]) -> int:
    """Return the length in tokens of the longest prefix, of a text with `keys`, whose key is among `held`; else 0."""
    return next((length for length, key in reversed([*zip(LENGTHS, keys, strict=False)]) if key in held), 0)


def pack_keys(keys: Iterable[int]) -> str:
    """Encode keys for an announcement, as hexadecimal text."""
    return np.array([*keys], "<u4").tobytes().hex()


@lru_cache(maxsize=1024)  # the latest announcements of all verifiers
def unpack_keys(text: str) -> frozenset[int]:
    """Decode the keys of an announcement. A malformed announcement gives none."""
    with suppress(ValueError):
        return frozenset(np.frombuffer(bytes.fromhex(text), "<u4").tolist())
    return frozenset()
