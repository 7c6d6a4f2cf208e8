"""A store returns what its documents contain and nothing else; a file that is no store is refused with a remedy."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.proposers import datastore
from outrider.core.proposers.datastore import Datastore, DatastoreContents, write_datastore
from outrider.core.proposers.interpolation import Interpolation, MatchRun, MatchRuns, MatchTrie
from outrider.core.proposers.ngram_tree import NOTHING, Continuation, best_nodes
from outrider.core.proposers.retrieval import ENOUGH, LONGEST, PLACES, SHORTEST, Retrieval
from outrider.errors import ConfigError, TokenizerMismatch

DIGEST = bytes(range(16))
DOCUMENT = st.lists(st.integers(0, 2), max_size=25)
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=5).filter(any)
LARGE = 100_000  # a vocabulary whose tokens take four bytes


def stored(path: Path, documents: Sequence[Sequence[int]], vocabulary: int = 3) -> Datastore:
    write_datastore(path, documents, tokenizer_digest=DIGEST, vocabulary=vocabulary)
    return Datastore.open(path, DIGEST)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For property tests, which run many examples in one folder."""
    return tmp_path_factory.mktemp("stores") / "a.rest"


def slow_found(documents: Sequence[Sequence[int]], end: Sequence[int], depth: int) -> list[MatchRuns]:
    """The definition, place by place, where few places match."""
    found: list[MatchRuns] = []
    counted: set[tuple[int, int]] = set()  # (document, index) of what followed

    def places(length: int) -> list[tuple[int, int]]:
        return [
            (number, at)
            for number, document in enumerate(documents)
            for at in range(length, len(document) + 1)
            if list(document[at - length : at]) == list(end[len(end) - length :])
        ]

    lengths = [length for length in range(SHORTEST, min(LONGEST, len(end)) + 1) if places(length)]
    length = max(lengths, default=0)
    while length >= SHORTEST:
        new = [place for place in places(length) if place not in counted]
        if new:
            found.append(MatchRuns(length, [MatchRun(documents[number][at : at + depth], 1) for number, at in new]))
        counted.update(new)
        length = max(length // 2, SHORTEST) if length > SHORTEST else 0
    return found


def as_paths(proposal: Continuation) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(proposal.parents, proposal.tokens, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, proposal.chances, strict=True))


@settings(max_examples=60)  # each writes a file and waits for the disk
@given(documents=DOCUMENTS, end=DOCUMENT, vocabulary=st.sampled_from([3, LARGE]))
def test_retrieval_proposes_the_continuation_of_the_longest_match(
    scratch: Path, documents: list[list[int]], end: list[int], vocabulary: int
) -> None:
    retrieval = Retrieval(stored(scratch, documents, vocabulary))
    for query in (end, documents[0], documents[-1][:9]):
        found = slow_found(documents, query, 4)
        if sum(len(runs.followed) for runs in found) > ENOUGH:
            continue
        proposal = retrieval.propose(query, 1000, 4)
        slow = best_nodes(MatchTrie(found, Interpolation()), 1000, 4, found[0].matched if found else 0)
        assert proposal.matched == slow.matched
        assert as_paths(proposal) == pytest.approx(as_paths(slow))


@settings(max_examples=30)
@given(documents=DOCUMENTS)
def test_a_store_holds_every_document_and_all_suffixes_in_order(scratch: Path, documents: list[list[int]]) -> None:
    store = stored(scratch, documents)
    kept = [document for document in documents if document]
    text = [token for document in kept for token in [*document, 3]]
    assert store.tokens.tolist() == text
    assert store.documents == len(kept)
    starts = store.suffixes.tolist()
    assert sorted(starts) == [at for at, token in enumerate(text) if token < 3]
    suffixes = [(text + [3] * LONGEST)[at : at + LONGEST] for at in starts]
    assert suffixes == sorted(suffixes)


def test_retrieval_proposes_nothing_across_two_documents(tmp_path: Path) -> None:
    store = stored(tmp_path / "a", [[1, 2, 3, 4], [5, 6, 7]], vocabulary=9)
    assert Retrieval(store).propose([1, 2], 9, 9).tokens == (3, 4)
    assert Retrieval(store).propose([3, 4], 9, 9) == NOTHING
    assert Retrieval(store).propose([4, 5], 9, 9) == NOTHING


def test_matches_below_the_minimum_length_are_ignored(tmp_path: Path) -> None:
    store = stored(tmp_path / "a", [[1, 2, 3]], vocabulary=9)
    for end in ([], [1], [7, 1]):
        assert Retrieval(store).propose(end, 9, 9) == NOTHING


def test_retrieval_without_a_node_budget_proposes_nothing(tmp_path: Path) -> None:
    retrieval = Retrieval(stored(tmp_path / "a", [[1, 2, 3]], vocabulary=9))
    assert retrieval.propose([1, 2], 0, 4) == retrieval.propose([1, 2], 4, 0) == NOTHING


def test_frequent_matches_are_sampled_evenly(tmp_path: Path) -> None:
    """Frequencies survive: three in four go on with 3."""
    documents = [[1, 2, 3] if turn % 4 else [1, 2, 4] for turn in range(20 * PLACES)]
    proposal = Retrieval(stored(tmp_path / "a", documents, vocabulary=9)).propose([1, 2], 9, 9)
    assert proposal.tokens == (3, 4)
    assert proposal.chances[0] / proposal.chances[1] == pytest.approx(3.0, rel=0.1)


def test_the_more_frequent_continuation_leads_and_a_longer_match_outweighs_it(tmp_path: Path) -> None:
    store = stored(tmp_path / "a", [[1, 2, 3]] * 5 + [[1, 2, 4]] * 2 + [[7, 8, 6, 5, 1, 2, 4]], vocabulary=9)
    assert Retrieval(store).propose([1, 2], 2, 1).tokens == (3, 4)
    assert Retrieval(store).propose([7, 8, 6, 5, 1, 2], 2, 1).tokens == (4, 3)


def test_a_corpus_that_is_wrong_about_a_text_is_trusted_less(tmp_path: Path) -> None:
    retrieval = Retrieval(stored(tmp_path / "a", [[1, 2, 3]], vocabulary=9))
    before = retrieval.propose([1, 2], 1, 1).chances[0]
    for _ in range(50):
        retrieval.learn([1, 2], 5)
    assert retrieval.propose([1, 2], 1, 1).chances[0] < 0.1 < before


def test_writing_returns_the_contents_and_reports_progress(tmp_path: Path) -> None:
    path = tmp_path / "a.rest"
    reported: list[float] = []
    written = write_datastore(path, [[1, 2], [], [3]], tokenizer_digest=DIGEST, vocabulary=9, progress=reported.append)
    assert written == DatastoreContents(documents=2, tokens=3, bytes=path.stat().st_size)
    assert reported[-1] == 1.0
    assert list(tmp_path.iterdir()) == [path]


def test_a_store_that_is_open_survives_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "a.rest"
    old = Retrieval(stored(path, [[1, 2, 3]], vocabulary=9))
    new = Retrieval(stored(path, [[1, 2, 4]], vocabulary=9))
    assert old.propose([1, 2], 1, 1).tokens == (3,)
    assert new.propose([1, 2], 1, 1).tokens == (4,)


def changed(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + value + content[at + len(value) :]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed(0, b"outrresT"), "not a store"),
        (lambda content: b"#!/bin/sh\n" * 20, "not a store"),
        (lambda content: b"", "not a store"),
        (changed(8, struct.pack("<I", 2)), "version 2, must be 1"),
        (changed(12, struct.pack("<I", 4)), "damaged"),
        (changed(12, struct.pack("<I", 0)), "damaged"),
        (changed(40, struct.pack("<Q", 2**63)), "damaged"),
        (changed(48, struct.pack("<Q", 0)), "damaged"),
        (lambda content: content[:20], "incomplete"),
        (lambda content: content[:64], "incomplete"),
        (lambda content: content[:-1], "incomplete"),
        (lambda content: content + b"\0", "damaged"),
    ],
)
def test_a_file_that_is_no_good_store_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    path = tmp_path / "a.rest"
    stored(path, [[1, 2, 3]], vocabulary=9)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match=problem) as caught:
        Datastore.open(path, DIGEST)
    assert str(path) in str(caught.value)
    assert "`outrider index`" in str(caught.value)


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.rest"
    stored(path, [[1, 2, 3]], vocabulary=9)
    with pytest.raises(TokenizerMismatch, match=rf"{DIGEST.hex()}.*--tokenizer"):
        Datastore.open(path, bytes(16))


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.rest: No such file.*`outrider index`"):
        Datastore.open(tmp_path / "gone.rest", DIGEST)


def test_a_damaged_store_proposes_only_ids_of_the_vocabulary(tmp_path: Path) -> None:
    """Damage that opening does not see costs speed and nothing else."""
    rng = np.random.default_rng(4)
    path = tmp_path / "a.rest"
    stored(path, rng.integers(0, 9, (20, 50)).tolist(), vocabulary=9)
    header, size = path.read_bytes()[:64], path.stat().st_size
    for _ in range(20):
        path.write_bytes(header + rng.bytes(size - 64))
        retrieval = Retrieval(Datastore.open(path, DIGEST))
        for _ in range(20):
            proposal = retrieval.propose(rng.integers(0, 9, 16).tolist(), 50, 5)
            assert all(0 <= token < 9 for token in proposal.tokens)


@pytest.mark.parametrize(
    ("documents", "problem"),
    [([], "no text"), ([[], []], "no text"), ([[1, 9]], "token 9"), ([[-1]], "token -1")],
    ids=str,
)
def test_invalid_documents_make_no_store(tmp_path: Path, documents: list[list[int]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        stored(tmp_path / "a.rest", documents, vocabulary=9)
    assert not list(tmp_path.iterdir())


def test_too_many_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastore, "MAX_TOKENS", 10)
    with pytest.raises(ConfigError, match="more than 10 tokens; make several stores"):
        stored(tmp_path / "a.rest", [[1, 2, 3]] * 3, vocabulary=9)
    assert not list(tmp_path.iterdir())


class FullDisk:
    """Files that take a number of bytes and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path, mode: str) -> Any:
        disk, file = self, path.open(mode, buffering=0)

        class Full:
            def __enter__(self) -> Full:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, data: bytes) -> int:
                if file.tell() + len(data) > disk.room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(data) or 0

        return Full()


@pytest.mark.parametrize("room", [0, 64, 500, 2500], ids=["header", "tokens", "more tokens", "suffixes"])
def test_a_full_disk_is_reported_and_leaves_no_file_and_the_old_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "a.rest"
    stored(path, [[1, 2, 3]], vocabulary=9)
    monkeypatch.setattr(datastore, "open", FullDisk(room).open, raising=False)
    with pytest.raises(ConfigError, match=r"a\.rest: cannot be written \(No space left on device\)"):
        write_datastore(path, [[4, 5] * 50] * 10, tokenizer_digest=DIGEST, vocabulary=9)
    assert list(tmp_path.iterdir()) == [path]
    assert Retrieval(Datastore.open(path, DIGEST)).propose([1, 2], 1, 1).tokens == (3,)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_at_the_very_end_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(datastore.os, step, fail)
    with pytest.raises(ConfigError, match="Input/output error"):
        stored(tmp_path / "a.rest", [[1, 2, 3]], vocabulary=9)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def documents() -> Any:
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_datastore(tmp_path / "a.rest", documents(), tokenizer_digest=DIGEST, vocabulary=9)
    assert not list(tmp_path.iterdir())


def test_retrieval_chances_come_true_where_corpus_and_text_are_alike(tmp_path: Path) -> None:
    """Within a tenth in every class of claims, after some of the text was learned from."""
    rng = random.Random(6)
    weights = {token: [rng.expovariate(1.0) ** 3 for _ in range(30)] for token in range(30)}

    def text(length: int) -> list[int]:
        tokens = [0]
        while len(tokens) < length:
            tokens += rng.choices(range(30), weights[tokens[-1]])
        return tokens

    retrieval = Retrieval(stored(tmp_path / "a.rest", [text(500) for _ in range(20)], vocabulary=30))
    claimed: dict[int, list[tuple[float, bool]]] = {}
    text_tokens = text(3000)
    for at in range(LONGEST, len(text_tokens)):
        if at > 1000 and at % 2:
            proposal = retrieval.propose(text_tokens[at - LONGEST : at], 6, 1)
            for token, chance in zip(proposal.tokens, proposal.chances, strict=True):
                claimed.setdefault(int(chance * 5), []).append((chance, token == text_tokens[at]))
        else:
            retrieval.learn(text_tokens[at - LONGEST : at], text_tokens[at])
    classes = [claims for claims in claimed.values() if len(claims) >= 150]
    assert len(classes) >= 3
    for claims in classes:
        chances, hits = zip(*claims, strict=True)
        assert sum(chances) / len(claims) == pytest.approx(sum(hits) / len(claims), abs=0.1)
