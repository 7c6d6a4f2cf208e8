"""Single tokens as text: together they are what the text is, whatever the kind of vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.requests.served_models import TokenText
from tests.router.rig import MODEL

TEXTS = ["def f(x):\n    return x  # é🙂\n", " leading", "naïve — “quotes” 日本語", "\t\x00\x7f"]


def _sentencepiece() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "é"]
    merges = [("▁", "a"), ("▁a", "b")]
    made = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_byte_level_vocabulary_are_the_bytes_of_the_text(text: str) -> None:
    spelled = TokenText(MODEL.tokenizer)
    ids = MODEL.tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(spelled, ids)) == text.encode()
    assert any(len(spelled(token)) == 1 for token in range(256))


@pytest.mark.parametrize("text", ["ab é🙂", "a ab", "b\n日本"])
def test_tokens_of_a_sentencepiece_vocabulary_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = _sentencepiece()
    spelled = TokenText(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(spelled, ids)) == f" {text}".encode()  # it begins every text with a space


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    assert TokenText(MODEL.tokenizer)(10**6) == b""
