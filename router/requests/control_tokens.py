"""Keeps callers' texts from becoming control tokens of a prompt: a message cannot forge a turn of the conversation.

A chat template writes control tokens and callers' texts into one text, in which a tokenizer takes one for the other. So
before the template is rendered, each control token in what the caller sent is divided by a character that occurs
nowhere, and behind it the prompt is divided there: its parts are tokenized one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

DIVIDERS = range(0xE000, 0xF900)  # characters for private use


class ControlTokens:
    """The texts of the tokens that only a model's chat template may write."""

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        """`added`: the tokenizer's; the special ones are control tokens, and those that occur in the template."""
        texts = {token.content for token in added if token.special or token.content in template}
        self._texts = tuple(sorted(text for text in texts if text.strip()))

    def divide(self, value: Any, divider: str, *, allowed: Sequence[str] = ()) -> Any:
        """Return a JSON value with all control tokens in its texts divided, but for those that are `allowed`."""
        if isinstance(value, str):
            for text in self._texts:
                if text not in allowed:
                    value = value.replace(text, f"{text[0]}{divider}{text[1:]}")
            return value
        if isinstance(value, Mapping):
            return {
                self.divide(key, divider): self.divide(part, divider, allowed=allowed) for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.divide(part, divider, allowed=allowed) for part in value]
        return value


def unused_divider(*values: Any) -> str:
    """Return a character that occurs in no text of JSON values."""
    texts = [*_texts(values)]
    return next(divider for divider in map(chr, DIVIDERS) if not any(divider in text for text in texts))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (key, *_texts(part))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
