"""How texts are divided before merges: the regular expressions that `tokenizer.ggml.pre` stands for.

Each is a fact of the models that have it: another one makes other tokens of the same text.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _words(digits: str, letter: str = r"\p{L}", marks: str = "") -> str:
    """Return the expression of Llama 3 and Qwen: words with what is before them, numbers, signs, lines, spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased(digits: str, contractions: str = "") -> str:
    """Return the expression of Tekken and o200k: a word ends where an upper letter follows a lower one."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before, ending = r"[^\r\n\p{L}\p{N}]?", f"{contractions}?" if contractions else ""
    return (
        f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


class PreTokenizer(NamedTuple):
    """What is done to a text before its merges."""

    splits: tuple[str, ...]  # regular expressions: each divides the parts that those before it have left
    adds_bos: bool = False  # where the file does not say it
    ignores_merges: bool = False  # a part that is a token becomes that token
    composes: bool = False  # Unicode's form NFC


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), adds_bos=True, ignores_merges=True)
_GLM4 = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), composes=True)
_STABLELM2 = PreTokenizer((_words(r"\p{N}"),))
_DIGITS = PreTokenizer((r"\p{N}", GPT2))
_O200K = PreTokenizer((_cased(r"\p{N}{1,3}", _CONTRACTIONS),))

PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _GLM4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), _STABLELM2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2"), PreTokenizer((GPT2,))),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "qwen35": PreTokenizer((_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),), composes=True),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), adds_bos=True, ignores_merges=True),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    # What llama.cpp does for files of before it had names for these; it warns that answers are worse.
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
