"""Texts that tokenizers divide in different ways, and how llama.cpp divides them."""

from __future__ import annotations

import random
from functools import cache

from tokenizers.pre_tokenizers import ByteLevel

TEXTS = [
    *("", "a", " a", "  a", "a ", "Hello world", " Hello  world   \n", "\n", "\n\n", "\n\n\n a", "\t\t", "\r\n\r\n x"),
    *("I'm you'RE we'll don't O'Neill", "'s 't 'S", "don’t", "!!!...???---===", "x" * 50, "CamelCaseHTTPServer iPhone"),
    *("12345 6 789012,345.67", "1 22 333 4444", "10000000000", "3.14e-10", "ﬁ ½ ² ①", "Ⅷ Ⅻ", "𝒳 𝔸"),
    *("wörld naïve café", "你好世界,再见。", "こんにちは世界", "안녕하세요 세계", "مرحبا بالعالم", "हिन्दी में", "ไทย"),
    *("🙂🙃👩‍👩‍👧‍👦", "a\u200bb\u00a0c\u3000d", " \u00a0 mixed", "\x01\x7f", "\ufeffx", "\U0010ffff"),
    *("def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass", "a_b_c __init__ $x = {'k': [1,2]}", "foo\r\nbar"),
    *("<|im_start|>user\nHi<|im_end|>\n", "<start_of_turn>user\nhi<end_of_turn>", "<bos>x<end>", "<0x0A>"),
    *("<h1>Title</h1>  <p>x</p>", "     five", "  \n  \n", "abc\n\ndef", "http://a.b/c?d=e&f=g#h", "<|endoftext|>"),
]
_CHARACTERS = "ab  \n\t'sé你🙂1 23.,<|>_-AB\u00a0"
_random = random.Random(1)
TEXTS += ["".join(_random.choice(_CHARACTERS) for _ in range(_random.randrange(1, 40))) for _ in range(300)]

_LONGEST = 7  # letters of a token, each of which is a byte


@cache
def greedy_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a vocabulary that has whatever these texts have: only their division keeps it apart."""
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    merges: dict[tuple[str, str], None] = {}
    for length in range(2, _LONGEST + 1):
        for text in TEXTS:
            (written, _), *_ = letters.pre_tokenize_str(text) or [("", None)]
            for start in range(len(written) - length + 1):
                piece = written[start : start + length]
                merges[piece[:-1], piece[-1]] = None
    tokens = [*sorted(ByteLevel.alphabet()), *dict.fromkeys("".join(pair) for pair in merges)]
    return tokens, [" ".join(pair) for pair in merges]
