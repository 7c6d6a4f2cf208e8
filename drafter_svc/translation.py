"""Between the target's tokens and those of a drafter with another tokenizer: by their text.

Source: universal assisted generation (Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202, algorithm 2, string-level exact match). What is proposed
is accepted as always, by the equality of the target's tokens, so that a bad translation costs speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 8  # tokens before a piece that it is decoded and encoded with: some tokenizers treat a beginning otherwise
OPEN = 96  # latest tokens whose translation may still change
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are not a character, or not yet


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that `tokens` add behind others."""
    context = list(before[-CONTEXT:])
    whole: str = tokenizer.decode([*context, *tokens])
    return whole[len(tokenizer.decode(context)) :]


def tokens_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The tokens of `text` behind another one; as if it stood alone where they would be merged into one."""
    whole = tokenizer.encode(before + text, add_special_tokens=False)
    for index, (start, _) in enumerate(whole.offsets):
        if start == len(before):
            return list(whole.ids[index:])
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


class Translation:
    """One session's text in both vocabularies, as it goes on. Takes time in proportion to what is new."""

    def __init__(self, target: Tokenizer, own: Tokenizer) -> None:
        self.own_tokens: list[int] = []  # of all the text, the last ones as far as they are known
        self._target = target
        self._own = own
        self._tokens: list[int] = []  # the target's
        self._settled = 0  # of these, whose translation stays
        self._settled_own = 0  # own tokens that they are

    def extend(self, tokens: Sequence[int]) -> None:
        """The target said more. Changes the end of `own_tokens`, or only adds to it."""
        self._tokens.extend(tokens)
        while True:
            text = text_after(self._target, self._tokens[: self._settled], self._tokens[self._settled :])
            before = self._own.decode(self.own_tokens[max(0, self._settled_own - CONTEXT) : self._settled_own])
            own = tokens_after(self._own, before, text)
            self.own_tokens[self._settled_own :] = own
            if len(self._tokens) - self._settled <= OPEN or not self._settle():
                return

    def propose(self, path: Sequence[int]) -> list[int]:
        """A path of own tokens behind the text, in the target's tokens; none while it ends inside a character."""
        text = text_after(self._own, self.own_tokens, path)
        if not text or text.endswith(BROKEN):
            return []
        return tokens_after(self._target, self._target.decode(self._tokens[-CONTEXT:]), text)

    def _settle(self) -> bool:
        """Settles half of what is open, or a little more: up to where both vocabularies have a boundary."""
        opened = self._tokens[self._settled :]
        own = self.own_tokens[self._settled_own :]
        before, before_own = self._tokens[: self._settled], self.own_tokens[: self._settled_own]
        lengths = {len(text_after(self._own, before_own, own[:count])): count for count in range(1, len(own))}
        for count in range(len(opened) // 2, len(opened) - CONTEXT):
            text = text_after(self._target, before, opened[:count])
            if not text.endswith(BROKEN) and len(text) in lengths:
                self._settled += count
                self._settled_own += lengths[len(text)]
                return True
        return False
