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
MOST_OPEN = 2 * OPEN  # so many have a boundary among them, unless they are no text
PIECE = 64  # tokens that are translated at a time: to settle some of n open ones takes time in proportion to n squared
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
        self.settled = 0  # of these, so many stay as they are, however the text goes on
        self._target = target
        self._own = own
        self._tokens: list[int] = []  # the target's
        self._settled = 0  # of these, whose translation stays

    def extend(self, tokens: Sequence[int]) -> int:
        """The target said more. Changes the end of `own_tokens`, or only adds to it; returns how many are as before."""
        same = len(self.own_tokens)
        for start in range(0, max(1, len(tokens)), PIECE):
            same = min(same, self._extend(tokens[start : start + PIECE]))
        return same

    def propose(self, path: Sequence[int]) -> list[int]:
        """A path of own tokens behind the text, in the target's tokens; none while it ends inside a character."""
        text = text_after(self._own, self.own_tokens, path)
        if not text or text.endswith(BROKEN):
            return []
        return tokens_after(self._target, self._target.decode(self._tokens[-CONTEXT:]), text)

    def _extend(self, tokens: Sequence[int]) -> int:
        first, before = self.settled, self.own_tokens[self.settled :]
        self._tokens.extend(tokens)
        while True:
            text = text_after(self._target, self._context(), self._tokens[self._settled :])
            own = tokens_after(self._own, self._own.decode(self._own_context()), text)
            self.own_tokens[self.settled :] = own
            opened = len(self._tokens) - self._settled
            if opened <= OPEN or not (self._settle() or (opened > MOST_OPEN and self._settle_anyhow())):
                break
        for place, token in enumerate(before, first):
            if place == len(self.own_tokens) or self.own_tokens[place] != token:
                return place
        return first + len(before)

    def _settle(self) -> bool:
        """Settles half of what is open, or a little more: up to where both vocabularies have a boundary."""
        opened, before = self._tokens[self._settled :], self._context()
        own, before_own = self.own_tokens[self.settled :], self._own_context()
        lengths = {len(text_after(self._own, before_own, own[:count])): count for count in range(1, len(own))}
        for count in range(len(opened) // 2, len(opened) - CONTEXT):
            text = text_after(self._target, before, opened[:count])
            if not text.endswith(BROKEN) and len(text) in lengths:
                self._settled += count
                self.settled += lengths[len(text)]
                return True
        return False

    def _settle_anyhow(self) -> bool:
        """Settles half of what is open although there is no boundary: of bytes that are no text the translation is none
        anyway, and they must not be looked at again and again."""
        count = (len(self._tokens) - self._settled) // 2
        text = text_after(self._target, self._context(), self._tokens[self._settled : self._settled + count])
        self.own_tokens[self.settled :] = tokens_after(self._own, self._own.decode(self._own_context()), text)
        self._settled, self.settled = self._settled + count, len(self.own_tokens)
        return True

    def _context(self) -> list[int]:
        """The target's tokens before what is open."""
        return self._tokens[max(0, self._settled - CONTEXT) : self._settled]

    def _own_context(self) -> list[int]:
        """The own ones."""
        return self.own_tokens[max(0, self.settled - CONTEXT) : self.settled]
