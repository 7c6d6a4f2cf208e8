"""Text comes out in pieces, whole characters only, the same however the tokens came."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.core.answers.answer_reader import PLAIN_FORM
from outrider.core.session.contract import Contract
from outrider.limits.fair_turns import LoopTurns
from outrider.store.records import SessionTurn
from router.counters.usage_stats import UsageStats
from router.sessions.takeover import new_response as answer_of
from router.text.detokenizer import AnswerText, Detokenizer, StopStrings

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[3] / "models" / "target" / "tokenizer.json"))
VOCABULARY = TOKENIZER.get_vocab_size()

any_ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=50)
byte_ids = st.lists(st.integers(0, 260), max_size=50)  # mostly single bytes: half and broken characters


def _chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def _answer(stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> AnswerText:
    return AnswerText(Detokenizer(TOKENIZER, prompt), stops)


def _at_once(ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """The slow reference: text up to the first stop, and the tokens up to the one that completed it."""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count])
        # What may still become a character is not text yet.
        if count < len(ids):
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], count
    return TOKENIZER.decode(ids), len(ids)


@given(any_ids | byte_ids, st.lists(st.integers(0, 50), max_size=8))
def test_any_chunking_gives_the_text_of_decoding_at_once(ids: list[int], cuts: list[int]) -> None:
    answer = _answer()
    pieces = [answer.feed(chunk).text for chunk in _chunks(ids, cuts)]
    assert "".join(pieces) + answer.flush() == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, 20), max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_the_text_does_not_depend_on_the_commits_where_ids_have_no_text(ids: list[int], cuts: list[int]) -> None:
    """As those of a padded vocabulary: what joins the words beside one is not what decoding at once puts there."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(16)}, unk_token="w0"))
    one, all_ = (AnswerText(Detokenizer(words), ()) for _ in range(2))
    each = "".join(one.feed([token]).text for token in ids)
    assert "".join(all_.feed(chunk).text for chunk in _chunks(ids, cuts)) == each


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_no_piece_splits_a_character(prompt: str, text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode(prompt).ids)
    ids = TOKENIZER.encode(text).ids
    pieces = [detokenizer.feed(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(
    st.text(alphabet="abc é🙂", max_size=40),
    st.lists(st.text(alphabet="abc é🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_stop_strings_are_found_across_tokens(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text).ids
    expected, count = _at_once(ids, stops)
    answer, out, taken = _answer(stops), "", 0
    for chunk in _chunks(ids, cuts):
        piece = answer.feed(chunk)
        out, taken = out + piece.text, taken + piece.tokens
        assert expected.startswith(out)
        if piece.stopped:
            break
    else:
        out += answer.flush()
    assert (out, taken) == (expected, count)


@given(st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_only_a_possible_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher, out = StopStrings(stops), ""
    for count, character in enumerate(text, 1):
        piece, stopped = matcher.feed(character)
        out += piece
        if stopped:
            assert any(text[:count].endswith(stop) for stop in stops)
            break
        held = text[len(out) : count]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_special_and_silent_tokens_have_no_text() -> None:
    ids = TOKENIZER.encode("ab").ids
    detokenizer = Detokenizer(TOKENIZER, silent=[ids[-1]])
    assert [detokenizer.feed(token) for token in (0, *ids[:-1], ids[-1], 0)] == [
        "",
        *(TOKENIZER.decode([token]) for token in ids[:-1]),
        "",
        "",
    ]


def test_a_prompt_that_ends_inside_a_character_keeps_that_part() -> None:
    ids = TOKENIZER.encode("🙂").ids
    assert len(ids) > 1
    answer = _answer(prompt=ids[:-1])
    text = answer.feed(ids[-1:] + TOKENIZER.encode("abc").ids).text + answer.flush()
    assert text == TOKENIZER.decode(ids[-1:] + TOKENIZER.encode("abc").ids)


def _sentencepiece_like() -> Tokenizer:
    """Words that begin with a marked space, and bytes for everything else, as Llama 2 and Mistral have them."""
    pieces = ["<unk>", "<s>", "▁Hello", "▁world", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("prompt", [[2], [1, 2], [2, 3, 4, 2, 3, 4, 2]])
def test_a_leading_space_survives_where_the_answer_continues_the_prompt(prompt: list[int]) -> None:
    detokenizer = Detokenizer(_sentencepiece_like(), prompt)
    smile = [5 + byte for byte in "🙂".encode()]
    pieces = [detokenizer.feed(token) for token in (3, *smile, 1, 3)]
    assert pieces == [" world", "", "", "", "🙂", "", " world"]


def test_marks_that_are_special_tokens_have_text() -> None:
    tokenizer = _sentencepiece_like()
    mark = tokenizer.token_to_id("<s>")
    for shown, text in (((), "Hello"), ((mark,), "<s> Hello")):
        detokenizer = Detokenizer(tokenizer, shown=shown)
        found = "".join(map(detokenizer.feed, (mark, tokenizer.token_to_id("\u2581Hello")))) + detokenizer.flush()
        assert found.strip() == text


async def test_a_resumed_answer_repeats_its_text() -> None:
    model: Any = SimpleNamespace(tokenizer=_sentencepiece_like(), marks=(), form_behind=lambda prompt, **_: PLAIN_FORM)
    answer = answer_of(model, (1, 2), SessionTurn(Contract(seed=1, max_tokens=9), (), 2, None), UsageStats())
    parts = await answer.replay((3, 2, 3), b"", LoopTurns(), "one")
    assert "".join(part.text for part in parts) == " world Hello world"


def test_endless_broken_bytes_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    half = TOKENIZER.encode("🙂").ids[0]
    assert any(detokenizer.feed(half) for _ in range(100))


def test_an_incomplete_character_is_held_for_64_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    half = TOKENIZER.encode("🙂").ids[0]
    pieces = [detokenizer.feed(half) for _ in range(64)]
    assert pieces[:-1] == [""] * 63
    assert set(pieces[-1]) == {"\N{REPLACEMENT CHARACTER}"}
    assert detokenizer.flush() == ""


def test_tokens_in_one_chunk_give_one_text_and_held_text_is_flushed_at_the_end() -> None:
    answer = _answer(["abc"])
    taken = answer.feed(TOKENIZER.encode("x ab").ids)
    assert (taken.text, taken.stopped) == ("x ", False)
    assert answer.flush() == "ab"
    assert answer.flush() == ""
    assert StopStrings([]).feed("abc") == ("abc", False)


def test_a_stop_string_that_the_last_held_character_completes_ends_the_text() -> None:
    ids = TOKENIZER.encode("🙂").ids
    answer = _answer(["\N{REPLACEMENT CHARACTER}"])
    assert answer.feed([*TOKENIZER.encode("a").ids, *ids[:-1]]).text == "a"
    assert answer.flush() == ""  # half a character, which is the stop string


@pytest.mark.parametrize("unstopped", [0, 1, 2])
def test_a_stop_string_counts_only_after_min_tokens(unstopped: int) -> None:
    ids = [token for word in ("ab", "ab", "ab") for token in TOKENIZER.encode(word).ids]
    each = len(ids) // 3
    answer = AnswerText(Detokenizer(TOKENIZER), ["ab"], unstopped=unstopped * each)
    taken = answer.feed(ids)
    assert taken == (TOKENIZER.decode(ids[: unstopped * each]), (unstopped + 1) * each, True)


@given(
    st.text(alphabet="abc é🙂", max_size=40),
    st.lists(st.text(alphabet="abc é🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_a_text_that_includes_its_stop_string_ends_behind_it(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text).ids
    without, count = _at_once(ids, stops)
    answer = AnswerText(Detokenizer(TOKENIZER), stops, include_stop=True)
    pieces = [answer.feed(chunk) for chunk in _chunks(ids[:count], cuts)]
    made = "".join(piece.text for piece in pieces) + ("" if pieces and pieces[-1].stopped else answer.flush())
    assert made in {without, *(without + stop for stop in stops)}
    assert (made != without) is any(stop in text for stop in stops)
    assert text.startswith(made)
    assert sum(piece.tokens for piece in pieces) == count


def test_the_first_of_several_stop_strings_ends_the_text() -> None:
    assert StopStrings(["cd", "bc", "x"]).feed("abcd") == ("a", True)
    matcher = StopStrings(["aab"])
    assert [matcher.feed(character) for character in "aaab"] == [("", False), ("", False), ("a", False), ("", True)]


def test_a_stop_string_is_found_after_a_failed_partial_match() -> None:
    matcher = StopStrings(["aaba"])
    assert [matcher.feed(character) for character in "aaaba"] == [
        ("", False),
        ("", False),
        ("a", False),
        ("", False),
        ("", True),
    ]
    matcher = StopStrings(["abcd"])
    assert "".join(matcher.feed(character)[0] for character in "aabcd") == "a"
