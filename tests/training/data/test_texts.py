"""Texts are the content of their files, each on its side of the split; the error of a wrong one names it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.training.data.texts import TrainingText, TrainingTexts
from outrider.training.recipe import TextSettings


def texts(*sources: Path | str, **settings: Any) -> TrainingTexts:
    return TrainingTexts(TextSettings(text=tuple(map(str, sources)), **settings))


def files(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"text {number}", encoding="utf-8")
    return folder


def test_a_texts_name_alone_decides_whether_it_is_held_out(tmp_path: Path) -> None:
    many = {text.name: text.held_out for text in texts(files(tmp_path / "many", 400), held_out=10)}
    few = {text.name: text.held_out for text in texts(files(tmp_path / "few", 100), held_out=10)}
    assert few == {name: many[name] for name in few}
    assert 20 <= sum(many.values()) <= 60
    for name, held_out in few.items():
        assert held_out == (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < 10)


def test_a_single_file_is_split_by_its_end_between_lines(tmp_path: Path) -> None:
    content = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "one.txt").write_text(content, encoding="utf-8")
    train, held_out = texts(tmp_path / "one.txt", held_out=5)
    assert (train.held_out, held_out.held_out) == (False, True)
    assert train.content + held_out.content == content
    assert held_out.content.startswith("line 9")
    assert len(held_out.content) == pytest.approx(0.05 * len(content), abs=10)


def test_a_pattern_selects_files_and_skips_hidden_ones(tmp_path: Path) -> None:
    files(tmp_path / "some", 2)
    for name in ("some/code.py", "some/.hidden.txt"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert [text.name for text in texts(tmp_path / "some", pattern="*.txt")] == ["0.txt", "1.txt"]
    with pytest.raises(ConfigError, match=r"no file matches '\*\.rs'; give another --pattern"):
        texts(tmp_path, pattern="*.rs")
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        texts(tmp_path / "nowhere")


def test_bytes_that_are_not_utf_8_are_named_or_left_out_and_counted(tmp_path: Path) -> None:
    files(tmp_path / "some", 3)
    (tmp_path / "some" / "1.txt").write_bytes("grün".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"some/1\.txt: is not UTF-8 from byte 2 on; .*--skip-invalid"):
        list(texts(tmp_path / "some"))
    lenient = texts(tmp_path / "some", skip_invalid=True)
    assert [text.name for text in lenient] == ["0.txt", "2.txt"]
    assert lenient.skipped == 1


def test_lines_of_json_are_texts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"said": f"text {number}"}) + "\n" for number in range(50)), encoding="utf-8")
    found = list(texts(path, field="said", held_out=20))
    assert [text.content for text in found] == [f"text {number}" for number in range(50)]
    assert 0 < sum(text.held_out for text in found) < 25
    with pytest.raises(ConfigError, match=r"line 1 is no JSON object with text in 'text'; .*--field"):
        list(texts(path))
    path.write_bytes(b'{"text": "good"}\n{"text": "b\xff"}\n')
    with pytest.raises(ConfigError, match="is not UTF-8 from byte 28 on"):
        list(texts(path))
    lenient = texts(path, skip_invalid=True)
    assert [text.content for text in lenient] == ["good"]
    assert lenient.skipped == 1
    for wrong in ('{"text": 5}', "[]", '{"text": "\\ud800"}'):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ConfigError, match="line 1 is no JSON object with text"):
            list(texts(path))


def test_the_digest_covers_the_texts_and_their_split(tmp_path: Path) -> None:
    folder = files(tmp_path / "some", 20)
    first = texts(folder).digest()
    assert texts(folder).digest() == first
    assert texts(folder, held_out=50).digest() != first
    (folder / "3.txt").write_text("text X", encoding="utf-8")
    assert texts(folder).digest() != first


def test_the_standard_library_is_read_without_installed_packages() -> None:
    found = {text.name: text for text in texts("stdlib")}
    assert not [name for name in found if "site-packages" in name or not name.endswith(".py")]
    assert isinstance(found["argparse.py"], TrainingText)
    assert found["argparse.py"].held_out  # the reference prompts are of it
    assert 0.02 < sum(text.held_out for text in found.values()) / len(found) < 0.06
