"""Keeps callers' texts from becoming control tokens of a prompt, so that a message cannot forge a turn whose marks are
such tokens. (Where a model's turns are marked by ordinary text, a message can spell that.)

A chat template writes control tokens and callers' texts into one text, in which a tokenizer takes one for the other. So
before the template is rendered, each control token in what the caller sent is divided by a random text. Behind the
rendering the prompt is divided there: its parts are tokenized one by one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken


class ControlTokens:
    """The texts of the tokens that only a model's chat template may write."""

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        """`added`: the tokenizer's; the special ones are control tokens, and those that occur in the template."""
        texts = {token.content for token in added if token.special or token.content in template}
        self._texts = tuple(sorted(text for text in texts if len(text.strip()) > 1))

    def divide(self, value: Any, divider: str, *, allowed: Sequence[str] = ()) -> Any:
        """Return a JSON value with all control tokens in its texts divided, but for those that are `allowed`."""
        if isinstance(value, str):
            for text in self._texts:
                while text in value and text not in allowed:  # twice where it overlaps itself
                    value = value.replace(text, f"{text[0]}{divider}{text[1:]}")
            return value
        if isinstance(value, Mapping):
            return {
                self.divide(key, divider): self.divide(part, divider, allowed=allowed) for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.divide(part, divider, allowed=allowed) for part in value]
        return value


def new_divider() -> str:
    """Return a text that nobody can have put into a message."""
    return f"\ue000{secrets.token_hex(16)}\ue000"
