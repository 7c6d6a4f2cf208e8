"""Headers of GGUF files: read as the format's own package reads them, and refused by name where they lie."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.engine.checkpoints.gguf.header import GgufFile, kept_header, read_gguf, split_paths
from outrider.errors import CheckpointError
from outrider.hub import gguf_stem
from tests.engine.gguf.small_files import ALIGNMENT, Made, Typed, packed, random_rows, text, write
from tests.engine.gguf.small_files import gguf as content

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.number": 7,
    "a.fraction": 0.5,
    "a.negative": Typed(11, struct.pack("<q", -3)),
    "a.texts": ["", "one", "zwei drei", "四"],
    "a.numbers": [1, 2, 3],
    "a.flags": [True, False],
    "nothing": [],
}
ROWS = random_rows("q4_k", 3, 512)
TENSORS = {
    "norm": Made("f32", (5,), np.arange(5, dtype=np.float32).tobytes()),
    "matrix": Made("q4_k", (3, 512), ROWS.tobytes()),
    "cube": Made("f16", (2, 3, 4)),
}


def test_metadata_and_tensors(tmp_path: Path) -> None:
    found = GgufFile(write(tmp_path / "a.gguf", METADATA, TENSORS))
    assert {
        key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.metadata.items()
    } == (METADATA | {"a.negative": -3})
    assert {name: (it.kind, it.shape) for name, it in found.tensors.items()} == {
        name: (it.kind, it.shape) for name, it in TENSORS.items()
    }
    np.testing.assert_array_equal(found.read("matrix"), ROWS)
    np.testing.assert_array_equal(found.read("matrix", slice(1, 3)), ROWS[1:3])
    assert found.read("matrix", slice(2, 2)).shape == (0, 288)
    np.testing.assert_array_equal(found.read("norm", slice(2, 4)).view(np.float32), [[2.0], [3.0]])
    assert found.read("cube").shape == (2, 24)
    with pytest.raises(CheckpointError, match="tensor other is missing"):
        found.read("other")


def test_files_of_the_formats_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("tokens", ["a", "b"])
    writer.add_custom_alignment(64)
    writer.add_tensor("x", np.arange(10, dtype=np.float32).reshape(2, 5))
    writer.add_tensor("y", np.ones(3, np.float16))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    found = GgufFile(tmp_path / "a.gguf")
    assert found.metadata["tokens"] == ["a", "b"]
    np.testing.assert_array_equal(found.read("x").view(np.float32), np.arange(10).reshape(2, 5))
    np.testing.assert_array_equal(found.read("y").view(np.float16), np.ones((3, 1)))


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", METADATA, TENSORS)
    found = GgufFile(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        found.read("matrix")


def test_headers_are_read_once_where_they_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", METADATA, TENSORS)
    with kept_header(path):
        found = read_gguf(path)
        with kept_header(path):
            assert read_gguf(path) is found
        assert read_gguf(path) is found
        with kept_header(tmp_path):  # no file of the format
            assert read_gguf(path) is found
        write(path, METADATA, {**TENSORS, "more": Made("f32", (1,))})
        with pytest.raises(CheckpointError, match="has changed while it was read"):
            read_gguf(path).read("matrix")
    assert "more" in read_gguf(path).tensors


def parts(folder: Path, count: int = 3, **changes: Any) -> Path:
    """A model of several parts, with a tensor in each."""
    for number in range(count):
        split = {"split.no": number, "split.count": count, "split.tensors.count": count} | changes.get(
            f"of{number}", {}
        )
        name = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        write(name, {**split, "general.architecture": "llama"}, {f"t{number}": Made("f32", (number + 1,))})
    return folder / f"m-00001-of-{count:05}.gguf"


def test_split_files(tmp_path: Path) -> None:
    first = parts(tmp_path)
    found = GgufFile(first)
    assert {name: it.shape for name, it in found.tensors.items()} == {"t0": (1,), "t1": (2,), "t2": (3,)}
    assert found.read("t2").shape == (3, 4)
    assert len(found.files) == 3
    assert gguf_stem(first) == "m"
    assert gguf_stem(Path("a/Q.Q4_K_M.gguf")) == "Q.Q4_K_M"
    with pytest.raises(CheckpointError, match=r"is part 2 of 3; give the first one, m-00001-of-00003\.gguf"):
        split_paths(tmp_path / "m-00002-of-00003.gguf")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"of1": {"split.no": 2}}, r"m-00002-of-00003.gguf: split.no is 2 of 3, must be 1 of 3"),
        ({"of2": {"split.count": 4}}, r"m-00003-of-00003.gguf: split.no is 2 of 4"),
        ({"of0": {"split.count": 4}}, r"is one of 4 parts, not of 3"),
        ({"of1": {"split.no": [1, 2]}}, r"split.no is array"),
        ({"of0": {"split.tensors.count": [3, 3]}}, r"split.tensors.count is array"),
        ({"of0": {"split.tensors.count": 9}}, r"split.tensors.count is 9, its 3 parts have 3"),
        ({"of0": {"split.count": 2**30}}, r"split.count is 1073741824, must be at most"),
    ],
)
def test_split_files_that_do_not_belong_together(tmp_path: Path, changes: Any, error: str) -> None:
    first = parts(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=error):
        GgufFile(first)


def test_a_part_is_missing(tmp_path: Path) -> None:
    first = parts(tmp_path)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: missing"):
        GgufFile(first)


def test_parts_with_one_tensor_twice(tmp_path: Path) -> None:
    first = parts(tmp_path)
    split = {"split.no": 1, "split.count": 3}
    write(tmp_path / "m-00002-of-00003.gguf", split, {"t0": Made("f32", (1,))})
    with pytest.raises(CheckpointError, match="has tensor t0, as an earlier part has"):
        GgufFile(first)


HUGE = 1 << 62
WHOLE = content(METADATA, TENSORS)


def nested(depth: int) -> Typed:
    """An array in an array in an array."""
    return Typed(9, struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQI", 4, 1, 0))


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no GGUF file, or truncated"),
    "a-beginning": (b"GGUF\3\0\0\0", "is no GGUF file, or truncated"),
    "another-format": (b"PK\3\4" + bytes(100), "is no GGUF file, or truncated"),
    "version-1": (content(version=1), "is GGUF of version 1, must be of 2 or 3; convert the model anew"),
    "version-4": (content(version=4), "is GGUF of version 4"),
    "big-endian": (content(version=3 << 24), "is big-endian"),
    "many-keys": (content(keys=HUGE), "has 4611686018427387904 keys"),
    "many-tensors": (content(count=HUGE), "4611686018427387904 tensors"),
    "more-keys": (content(METADATA, keys=99), "key 11 of the metadata is there twice"),
    "more-tensors": (content(METADATA, count=9), "tensor 1 has 0 dimensions"),
    "a-long-text": (
        content({"a": Typed(8, struct.pack("<Q", HUGE))}),
        "value 1 of the metadata has 4611686018427387904",
    ),
    "a-long-key": (content([("a" * 5000, 1)]), "key 1 of the metadata has 5000 bytes, must have at most 1024"),
    "a-key-twice": (content([("a", 1), ("a", 2)]), "key 2 of the metadata is there twice"),
    "many-texts": (content({"a": Typed(9, struct.pack("<IQ", 8, HUGE))}), "arrays have more than"),
    "many-numbers": (content({"a": Typed(9, struct.pack("<IQ", 10, HUGE))}), "the header does not fit"),
    "an-array-of-arrays": (content({"a": nested(1)}), "value 1 of the metadata is an array of arrays"),
    "deep-arrays": (content({"a": nested(100_000)}), "value 1 of the metadata is an array of arrays"),
    "another-type": (content({"a": Typed(13, b"")}), "value 1 of the metadata is of type 13"),
    "an-array-of-another-type": (content({"a": Typed(9, struct.pack("<IQ", 99, 1))}), "is an array of type 99"),
    "no-truth": (content({"a": Typed(7, b"\2")}), "is neither true nor false"),
    "no-utf-8": (content({"a": Typed(8, text(b"\xff\xfe"))}), "value 1 of the metadata is no text in UTF-8"),
    "no-utf-8-in-an-array": (
        content({"a": Typed(9, struct.pack("<IQ", 8, 1) + text(b"\xc3"))}),
        "value 1 of the metadata has an entry that is no text",
    ),
    "no-utf-8-in-a-key": (content([(b"\x80", 1)]), "key 1 of the metadata is no text"),
    "alignment-0": (content({"general.alignment": 0}), "general.alignment must be a power of two"),
    "alignment-24": (content({"general.alignment": 24}), "general.alignment must be a power of two"),
    "alignment-huge": (content({"general.alignment": 1 << 31}), "general.alignment must be a power of two"),
    "alignment-text": (content({"general.alignment": "32"}), "general.alignment must be a power of two"),
    "a-tensor-twice": (content((), [("a", Made("f32", (1,)))] * 2), "tensor 2 has the name of an earlier one"),
    "no-dimensions": (b"GGUF\3\0\0\0" + struct.pack("<QQ", 1, 0) + text("a") + bytes(99), "tensor 1 has 0 dimensions"),
    "many-dimensions": (content((), {"a": Made("f32", (1, 1, 1, 1, 1))}), "tensor 1 has 5 dimensions"),
    "dimension-0": (content((), {"a": Made("f32", (0, 5), b"")}), "tensor 1 has a dimension of 0"),
    "overflow": (content((), {"a": Made("f32", (1 << 40, 1 << 40), b"")}), "tensor 1 has a dimension of 0, or is too"),
    "a-terabyte": (content((), {"a": Made("f32", (1 << 19, 1 << 19), b"")}), "its tensors end at byte"),
    "no-whole-blocks": (content((), {"a": Made("q4_k", (1, 100), b"")}), "no whole blocks of 256 values"),
    "an-unknown-type": (content((), {"a": Made("f32", (1,), number=4)}), "tensor 1 is of type 4, which is not known"),
    "overlapping": (
        content((), [("a", Made("f32", (9,))), ("b", Made("f32", (9,), offset=32))]),
        "overlap, or leave gaps",
    ),
    "one-in-another": (
        content((), [("a", Made("f32", (9,))), ("b", Made("f32", (1,), offset=0))]),
        "overlap, or leave",
    ),
    "a-gap": (content((), [("a", Made("f32", (1,))), ("b", Made("f32", (1,), offset=96))]), "overlap, or leave gaps"),
    "not-aligned": (content((), [("a", Made("f32", (1,))), ("b", Made("f32", (1,), offset=8))]), "begins at byte 8"),
    "beyond-the-end": (content((), {"a": Made("f32", (1,), offset=HUGE)}), "overlap, or leave gaps"),
    "cut-data": (WHOLE[:-64], "its tensors end at byte"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_by_name(tmp_path: Path, name: str) -> None:
    lie, error = LIES[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(lie)
    with pytest.raises(CheckpointError, match=error) as refused:
        GgufFile(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert len(str(refused.value)) < len(str(path)) + 300


@pytest.mark.parametrize("cut", range(0, len(WHOLE) - ALIGNMENT, 7))
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    (tmp_path / "a.gguf").write_bytes(WHOLE[:cut])
    with pytest.raises(CheckpointError):
        GgufFile(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "long",
    [
        lambda count: Typed(9, struct.pack("<IQ", 8, count) + bytes(8 * count)),
        lambda count: Typed(9, struct.pack("<IQ", 8, count) + text("ab") * count),
        lambda count: Typed(9, struct.pack("<IQ", 12, count) + bytes(8 * count)),
    ],
)
def test_the_longest_arrays_are_read_fast(tmp_path: Path, long: Callable[[int], Typed]) -> None:
    path = write(tmp_path / "a.gguf", {"a": long((1 << 21) - 1)})
    began = time.process_time()
    assert len(GgufFile(path).metadata["a"]) == (1 << 21) - 1
    assert time.process_time() - began < 2


def test_a_terabyte_of_header_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"a": Typed(9, struct.pack("<IQ", 0, 1 << 39))})
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(CheckpointError, match="the header must have at most"):
        GgufFile(path)
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_a_vocabulary_of_262144_is_read_in_half_a_second(tmp_path: Path) -> None:
    tokens = [f"token{number}" for number in range(262_144)]
    path = write(
        tmp_path / "a.gguf",
        {
            "tokens": Typed(
                9, packed(tokens[:1]).content[:4] + struct.pack("<Q", len(tokens)) + b"".join(map(text, tokens))
            )
        },
    )
    began = time.process_time()
    found = GgufFile(path).metadata["tokens"]
    assert time.process_time() - began < 0.5
    assert found == tokens


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.integers(0, len(WHOLE)),
)
@example(changes=[], cut=len(WHOLE))
def test_damaged_files(tmp_path: Path, changes: list[tuple[int, bytes]], cut: int) -> None:
    damaged = bytearray(WHOLE[: cut or None])
    for at, replaced in changes:
        damaged[at : at + len(replaced)] = replaced
    path = tmp_path / "a.gguf"
    path.write_bytes(damaged)
    began = time.process_time()
    with suppress(CheckpointError):
        found = GgufFile(path)
        for name in found.tensors:
            found.read(name)
    assert time.process_time() - began < 1
