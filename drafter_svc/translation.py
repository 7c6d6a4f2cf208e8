"""Translates by text between the target's tokens and those of a drafter with another tokenizer.

Source: universal assisted generation (Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202, algorithm 2, string-level exact match). Proposals are
accepted as always, by equality of the target's tokens, so that a bad translation costs speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 8  # tokens before a piece that are decoded and encoded with it: some tokenizers treat a beginning otherwise
OPEN = 96  # latest tokens whose translation may still change
MAX_OPEN = 2 * OPEN  # this many tokens have a boundary among them, unless they are no text
PIECE = 64  # tokens that are translated at a time: to settle some of n open ones takes time in proportion to n squared
BROKEN = "\N{REPLACEMENT CHARACTER}"  # bytes that are no character, or not yet, decode to it


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add behind others."""
    context = list(before[-CONTEXT:])
    full_text: str = tokenizer.decode([*context, *tokens])
    return full_text[len(tokenizer.decode(context)) :]


def tokens_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Return the tokens of `text` behind another text; as if `text` stood alone where a token would span both."""
    encoding = tokenizer.encode(before + text, add_special_tokens=False)
    for index, (start, _) in enumerate(encoding.offsets):
        if start == len(before):
            return list(encoding.ids[index:])
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


class Translation:
    """One session's text in both vocabularies, as it grows. Takes time in proportion to the new tokens."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.draft_tokens: list[int] = []  # the drafter's tokens of the text; the last ones may still change
        self.settled = 0  # number of these that never change, however the text goes on
        self._target_tokenizer = target
        self._draft_tokenizer = draft
        self._tokens: list[int] = []  # the target's
        self._settled = 0  # number of these whose translation never changes

    @property
    def open_tokens(self) -> list[int]:
        """The target's tokens whose translation may still change."""
        return self._tokens[self._settled :]

    def extend(self, tokens: Sequence[int]) -> int:
        """Add the target's new tokens. Change the end of `draft_tokens`, or only add to it; return how many are as
        before.
        """
        same = len(self.draft_tokens)
        for start in range(0, max(1, len(tokens)), PIECE):
            same = min(same, self._extend(tokens[start : start + PIECE]))
        return same

    def propose(self, path: Sequence[int]) -> list[int]:
        """Translate a path of draft tokens behind the text to the target's; empty if it ends inside a character."""
        text = text_after(self._draft_tokenizer, self.draft_tokens, path)
        if not text or text.endswith(BROKEN):
            return []
        return tokens_after(self._target_tokenizer, self._target_tokenizer.decode(self._tokens[-CONTEXT:]), text)

    def _extend(self, tokens: Sequence[int]) -> int:
        first, before = self.settled, self.draft_tokens[self.settled :]
        self._tokens.extend(tokens)
        while True:
            text = text_after(self._target_tokenizer, self._context(), self.open_tokens)
            draft = tokens_after(self._draft_tokenizer, self._draft_tokenizer.decode(self._draft_context()), text)
            self.draft_tokens[self.settled :] = draft
            open_tokens = len(self._tokens) - self._settled
            if open_tokens <= OPEN or not (self._settle() or (open_tokens > MAX_OPEN and self._settle_anyhow())):
                break
        for index, token in enumerate(before, first):
            if index == len(self.draft_tokens) or self.draft_tokens[index] != token:
                return index
        return first + len(before)

    def _settle(self) -> bool:
        """Settles half of the open tokens, or a little more: up to where both vocabularies have a boundary."""
        open_tokens, before = self.open_tokens, self._context()
        draft, before_draft = self.draft_tokens[self.settled :], self._draft_context()
        lengths = {
            len(text_after(self._draft_tokenizer, before_draft, draft[:count])): count for count in range(1, len(draft))
        }
        for count in range(len(open_tokens) // 2, len(open_tokens) - CONTEXT):
            text = text_after(self._target_tokenizer, before, open_tokens[:count])
            if not text.endswith(BROKEN) and len(text) in lengths:
                self._settled += count
                self.settled += lengths[len(text)]
                return True
        return False

    def _settle_anyhow(self) -> bool:
        """Settles half of the open tokens although there is no boundary: bytes that are no text have no translation
        anyway, and must not be tried again and again.
        """
        count = (len(self._tokens) - self._settled) // 2
        text = text_after(self._target_tokenizer, self._context(), self._tokens[self._settled : self._settled + count])
        self.draft_tokens[self.settled :] = tokens_after(
            self._draft_tokenizer, self._draft_tokenizer.decode(self._draft_context()), text
        )
        self._settled, self.settled = self._settled + count, len(self.draft_tokens)
        return True

    def _context(self) -> list[int]:
        """Return the target's tokens before the open ones."""
        return self._tokens[max(0, self._settled - CONTEXT) : self._settled]

    def _draft_context(self) -> list[int]:
        """Return the draft tokens before the open ones."""
        return self.draft_tokens[max(0, self.settled - CONTEXT) : self.settled]
