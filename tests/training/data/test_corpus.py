"""Ids are what the tokenizer makes of the texts, made once; windows come from all of them, in an order of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError
from outrider.training.data import corpus as corpora
from outrider.training.data.corpus import Corpus, Vocabulary, prepare
from outrider.training.data.texts import TrainingTexts
from outrider.training.data.vocabulary import make_tokenizer
from outrider.training.data.windows import Windows, spread
from outrider.training.recipe import TextSettings, TokenizerRecipe
from tests.training.family import PAGES, TARGET


def prepared(source: Path, vocabulary: Vocabulary, folder: Path, held_out: int = 4) -> tuple[Corpus, list[str]]:
    """The corpus, and the stages that its preparation reported."""
    stages: list[str] = []
    texts = TrainingTexts(TextSettings(text=(str(source),), pattern="*.md", held_out=held_out))
    return prepare(texts, vocabulary, folder, lambda what, done: stages.append(what)), stages


def test_token_ids_are_the_texts_each_followed_by_a_separator(tmp_path: Path) -> None:
    vocabulary = Vocabulary.read(TARGET, 0)
    corpus, _ = prepared(PAGES, vocabulary, tmp_path / "ids", held_out=20)
    assert corpus.train.dtype == np.uint16
    for ids, held_out in ((corpus.train, False), (corpus.held_out, True)):
        texts = TrainingTexts(TextSettings(text=(str(PAGES),), pattern="*.md", held_out=20))
        expected = [text.content for text in texts if text.held_out == held_out]
        ends = np.flatnonzero(ids == 0)
        pieces = np.split(ids, ends + 1)[:-1]
        assert [vocabulary.tokenizer.decode(piece[:-1].tolist()) for piece in pieces] == expected


def test_long_texts_are_tokenized_in_pieces_that_make_up_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "PIECE", 100)
    monkeypatch.setattr(corpora, "BATCH", 1000)
    content = "one line\n" * 500 + "x" * 350 + "\nthe end"
    (tmp_path / "one.md").write_text(content, encoding="utf-8")
    vocabulary = Vocabulary.read(TARGET)
    assert vocabulary.separator == 0  # as tokenizer_config.json names it
    corpus, _ = prepared(tmp_path, vocabulary, tmp_path / "ids")
    tokens = np.concatenate([corpus.train, corpus.held_out])
    assert vocabulary.tokenizer.decode(tokens.tolist()) == content


def test_token_ids_are_made_anew_only_if_the_texts_or_the_tokenizer_changed(tmp_path: Path) -> None:
    pages, ids = tmp_path / "pages", tmp_path / "ids"
    pages.mkdir()
    for number in range(60):
        (pages / f"{number}.md").write_text(f"page {number}", encoding="utf-8")
    vocabulary = Vocabulary.read(TARGET)
    first, stages = prepared(pages, vocabulary, ids)
    assert "tokenizing texts" in stages
    again, stages = prepared(pages, vocabulary, ids)
    assert stages == ["reading texts"]
    assert np.array_equal(first.train, again.train)
    (pages / "1.md").write_text("another", encoding="utf-8")
    assert "tokenizing texts" in prepared(pages, vocabulary, ids)[1]
    make_tokenizer(TokenizerRecipe(text=(str(pages),), output=tmp_path / "other", vocabulary=260))
    assert "tokenizing texts" in prepared(pages, Vocabulary.read(tmp_path / "other"), ids)[1]
    (ids / "corpus.json").write_text("{", encoding="utf-8")  # as a crash may leave it
    assert "tokenizing texts" in prepared(pages, vocabulary, ids)[1]


def test_too_little_text_is_reported_before_anything_is_learned(tmp_path: Path) -> None:
    vocabulary = Vocabulary.read(TARGET)
    (tmp_path / "one.md").write_text("a few words\n" * 9, encoding="utf-8")
    corpus, _ = prepared(tmp_path, vocabulary, tmp_path / "ids")
    with pytest.raises(ConfigError, match=r"tokens are to learn from, and one window takes 513; .*smaller --window"):
        corpus.require(513)
    with pytest.raises(ConfigError, match=r"tokens are held out, and one window takes 17; .*larger --held-out"):
        corpus.require(17)


def test_a_tokenizer_is_made_of_texts_that_are_not_held_out(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for number in range(40):
        (pages / f"{number}.md").write_text(f"some words of page {number}, zaphod{number}\n" * 20, encoding="utf-8")
    settings = TokenizerRecipe(text=(str(pages),), output=tmp_path / "made", vocabulary=500, held_out=20)
    known = make_tokenizer(settings)
    words = json.loads((tmp_path / "made" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    held_out = {text.content for text in TrainingTexts(settings) if text.held_out}
    assert known == len(words) <= 500
    assert words["<|endoftext|>"] == 0
    assert held_out
    assert not [word for word in words if "zaphod" in word and any(f"{word.strip('Ġ')}\n" in text for text in held_out)]


def test_every_pass_sees_each_window_once_in_another_order() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    each_pass = Windows(ids, 16, seed=5).each_pass
    windows = Windows(ids, 16, seed=5, rows=each_pass)
    passes = [windows.batch(number) for number in range(3)]
    for seen in passes:
        assert seen.shape == (each_pass, 17)
        assert bool((seen.diff(dim=1) == 1).all())  # in one piece
        learned = seen[:, 1:].flatten()
        assert len(learned.unique()) == len(learned) > 960
    assert not torch.equal(passes[0], passes[1])
    assert set(passes[0][:, 0].tolist()) != set(passes[1][:, 0].tolist())  # other borders


def test_windows_are_a_function_of_the_seed_and_their_number() -> None:
    ids = np.arange(500, dtype=np.uint32)
    windows = Windows(ids, 16, seed=1, rows=4)
    later = windows.batch(17)
    windows.batch(0)
    assert torch.equal(windows.batch(17), later)
    assert torch.equal(Windows(ids, 16, seed=1, rows=2).batch(35), later[2:])
    assert not torch.equal(Windows(ids, 16, seed=2, rows=4).batch(17), later)


def test_the_shortest_text_is_one_window() -> None:
    ids = np.arange(17, dtype=np.uint16)
    assert Windows(ids, 16, seed=0).batch(5).tolist() == [list(range(17))]
    assert [each.tolist() for each in spread(ids, 8, 5)] == [list(range(8)), list(range(9, 17))]
