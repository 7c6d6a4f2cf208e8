"""What a router knows of a model: its tokenizer, its chat template and the tokens that end a text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.core.contract import MAX_STOP_IDS
from outrider.core.digest import tokenizer_digest
from outrider.errors import CheckpointError, InvalidRequest
from outrider.hub import checkpoint_folder
from router.chat import ChatTemplate, Message, read_chat_template
from router.spelling import Spelling

_LONG_TEXT = 4096  # characters; tokenizing more than this takes longer than other sessions should wait


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that this router takes requests for."""

    name: str
    tokenizer: Tokenizer
    digest: bytes  # of the tokenizer
    eos_ids: tuple[int, ...]
    chat: ChatTemplate | None = None
    spelled: Spelling = field(init=False)  # a token's text

    def __post_init__(self) -> None:
        object.__setattr__(self, "spelled", Spelling(self.tokenizer))

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a text; `special`: with the tokens that the tokenizer itself puts around a prompt."""
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self._encode, text, special)
        return self._encode(text, special)

    async def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the prompt that messages make; the template has the special tokens in it.

        Raises InvalidRequest where there is no template, or it refuses them.
        """
        if self.chat is None:
            raise InvalidRequest("messages", f"model {self.name!r} has no chat template; send a prompt")
        return await self.encode(await self.chat.render(messages), special=False)

    def close(self) -> None:
        """Ends what belongs to it."""
        if self.chat is not None:
            self.chat.close()

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=special).ids)


def load_model(name: str, checkpoint: Path) -> ServedModel:
    """Reads tokenizer.json and, where they are, generation_config.json, config.json and the chat template.

    Raises CheckpointError naming the file that is missing or broken.
    """
    folder = checkpoint_folder(checkpoint, weights=False)
    path = folder / "tokenizer.json"
    blob = _read(path)
    if blob is None:
        raise CheckpointError(f"{path}: no such file; models.{name} must be a folder that holds tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(blob)
        digest = tokenizer_digest(blob)
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from None
    return ServedModel(name, tokenizer, digest, tuple(_eos_ids(folder)), read_chat_template(folder))


def _eos_ids(folder: Path) -> Iterable[int]:
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        blob = _read(path)
        if blob is None:
            continue
        try:
            values: Any = json.loads(blob)
            found = values.get("eos_token_id")
        except (ValueError, AttributeError):
            raise CheckpointError(f"{path}: not a JSON object") from None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if len(ids) > MAX_STOP_IDS or not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of up to {MAX_STOP_IDS}")
        return ids
    return ()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
