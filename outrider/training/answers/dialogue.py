"""What a target is asked when it writes the texts that its drafter learns from.

A chat template with an empty user turn is the beginning of a text that the target goes on with: first it writes an
instruction, and behind the template's words between the turns its own answer (Magpie, arXiv 2406.08464, section 2.1).
Nobody's prompts are needed, and all of the text but the template's is the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from transformers import AutoTokenizer

from outrider.engine.checkpoints.checkpoint import copy_tokenizer
from outrider.errors import ConfigError

CONTENT = "CONTENT OF THE TURN"  # a user's content that shows where a template writes one

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to be written: given ids, then the target's; behind those, more given ones and the target's answer."""

    before: Ids
    between: Ids | None  # None: what the target writes behind `before` is the answer


class Dialogues:
    """Prompts for a target with a chat template: a user's own, or its own."""

    def __init__(self, target: Path, prompts: Sequence[str] = ()) -> None:
        """`prompts`: a user's own; they are answered one after another, again and again.

        Raises ConfigError for a target without a chat template, and CheckpointError for one that cannot be read.
        """
        with TemporaryDirectory(prefix="outrider-tokenizer-") as folder:
            copy_tokenizer(target, Path(folder))
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if tokenizer.chat_template is None:
            raise ConfigError(f"target: {target} has no chat template, so it writes no answers; give --text")
        self._tokenizer = tokenizer
        self._before, self._between = map(self._coded, self._rendered(CONTENT).split(CONTENT, 1))
        self._prompts = [*map(self.asked, prompts)]

    def __iter__(self) -> Iterator[Prompt]:
        """Yield prompts without end."""
        yield from cycle(self._prompts or [Prompt(self._before, self._between)])

    @property
    def longest(self) -> int:
        """The largest number of given tokens in a text."""
        return max((len(it.before) for it in self._prompts), default=len(self._before) + len(self._between))

    def asked(self, content: str) -> Prompt:
        """Return the prompt of a user's own words."""
        return Prompt(self._coded(self._rendered(content)), None)

    def _rendered(self, content: str) -> str:
        turns = [{"role": "user", "content": content}]
        found = str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        if content not in found:
            raise ConfigError("target: its chat template does not write a user's content as it is; give --text")
        return found

    def _coded(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class UserPrompt(NamedTuple):
    """A prompt of a user's file."""

    content: str
    category: str  # "": none


def read_prompts(path: Path, key: str) -> list[UserPrompt]:
    """Return a user's prompts: the lines of a text, or the fields `prompt` and `category` of lines of JSON.

    `key`: of the recipe, for errors. Raises ConfigError.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    prompts = [UserPrompt(line, "") for line in lines]
    if path.suffix == ".jsonl":
        try:
            objects = [json.loads(line) for line in lines]
            prompts = [UserPrompt(str(it["prompt"]), str(it.get("category", ""))) for it in objects]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{key}: {path} has a line that is no object with a field prompt ({error})") from None
    if not prompts:
        raise ConfigError(f"{key}: {path} has no prompt")
    return prompts
