"""The text of single tokens, for log-probabilities."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from router.text.detokenizer import REPLACEMENT

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"  # decoded before each token: some decoders treat a text's first token differently


class TokenText:
    """Maps a token id to its bytes in UTF-8; empty for an id outside the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        self._before = len(self._decode([]))
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return the token's bytes."""
        if token not in self._known:
            self._known[token] = self._bytes_of(token)
        return self._known[token]

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        text = self._decode([token])[self._before :]
        if REPLACEMENT not in text:
            return text.encode()
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([*self._anchor, *tokens], skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes behind the characters of byte-level vocabularies (Radford et al. 2019, GPT-2's encoder):
    printable bytes stand for themselves, the others for the characters from U+0100 on in their order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
