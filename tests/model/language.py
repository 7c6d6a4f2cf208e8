"""What the target generates: a pure function of all tokens before, by way of their digest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from outrider.core.session.digest import EMPTY, extend, mix64
from router.requests.served_models import ServedModel, load_model
from router.text.detokenizer import AnswerText, Detokenizer

_LOADED = load_model("target", Path(__file__).parents[2] / "models" / "target")
STOP_ID = 0
# With the two halves of an é, so that tokens end inside of characters.
WORDS = (_LOADED.tokenizer.encode("xé ab", add_special_tokens=False)).ids
MODEL = ServedModel("target", _LOADED.tokenizer, _LOADED.digest, (STOP_ID,), _LOADED.chat)
VOCABULARY = MODEL.tokenizer.get_vocab_size()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt is to be answered with."""

    tokens: tuple[int, ...]
    text: str
    stopped: bool


def choice(digest: int, salt: int = 0) -> int:
    """The target's token after the tokens of that digest. `salt`: whose rounding, where that decides."""
    value = mix64(digest ^ salt)
    return STOP_ID if value % 23 == 0 else WORDS[value // 23 % len(WORDS)]


@lru_cache
def answer(prompt: tuple[int, ...], max_tokens: int, stops: tuple[str, ...]) -> Answer:
    """The one true answer."""
    digest, generated = extend(EMPTY, prompt), list[int]()
    while len(generated) < max_tokens and (not generated or generated[-1] != STOP_ID):
        generated.append(choice(digest))
        digest = extend(digest, generated[-1:])
    return expected_answer(prompt, tuple(generated), stops)


@lru_cache
def expected_answer(prompt: tuple[int, ...], generated: tuple[int, ...], stops: tuple[str, ...]) -> Answer:
    """An answer by its tokens: what of them belongs to it, and its text, decoded at once."""
    text = AnswerText(Detokenizer(MODEL.tokenizer, prompt, silent=MODEL.eos_ids), stops)
    taken = text.feed(generated)
    rest = "" if taken.stopped else text.flush()
    tokens = generated[: taken.tokens]
    return Answer(tokens, taken.text + rest, taken.stopped or tokens[-1:] == (STOP_ID,))
