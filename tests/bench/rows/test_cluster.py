"""Rows of clusters: what each is asked, and of which processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import pytest

from bench import running as suites
from bench.options import BenchOptions
from bench.rows.cluster import ClusterRow
from bench.rows.requests import BenchRequest
from bench.rows.row import Models
from outrider.cli.performance.samples import Sample
from outrider.client._wire import Options as Terms
from outrider.config import ClusterConfig

ASK = BenchRequest((1, 2, 3), 1.0, 7, 4)
OPTIONS = BenchOptions(
    suites=(),
    targets=(),
    temperatures=(0.0,),
    short=(),
    fresh=(),
    long=(),
    repetitions=1,
    max_tokens=4,
    dtype="float32",
    threads=1,
    router={},
    verifier={},
    drafter={},
    rules=("recursive-rejection", "block-verification"),
    drafts=("prompt-lookup", "suffix"),
    learning_tokens=1,
    models=Path("models"),
    peers={},
    llama_cpp=False,
    profiled_steps=1,
    callers=(),
    arms=(),
    load_s=1.0,
    ramp_s=1.0,
    links=(),
    overlaps=(),
)


class Asked:
    """A cluster that notes what it is asked."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.client = self
        self.terms: list[Terms] = []


async def timed(cluster: Asked, prompt: Sequence[int], **terms: Unpack[Terms]) -> Sample:
    cluster.terms.append(terms)
    return Sample((1,), (0.1,), 1)


async def test_rules_and_lookups_are_rows_of_clusters_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def running(config: ClusterConfig) -> AsyncIterator[Any]:
        yield Asked(config)

    monkeypatch.setattr(suites, "running", running)
    monkeypatch.setattr(suites, "WORKERS", ())
    monkeypatch.setattr("bench.rows.cluster.timed", timed)
    progress: list[str] = []
    async with suites.open_rows(OPTIONS, tmp_path, "rows", progress.append) as rows:
        found: dict[str, tuple[Any, ...]] = {}
        for row in rows:
            assert isinstance(row, ClusterRow)
            await row.generate(ASK)
            cluster: Any = row.cluster
            terms = cluster.terms[-1]
            found[row.name] = terms["speculation"], terms["rule"], cluster.config.drafter[0].drafts
        clusters = [id(row.cluster) for row in rows]  # type: ignore[attr-defined]
    assert found == {
        "plain": ("off", "shared-noise", "model"),
        "distributed": (None, "shared-noise", "model"),
        "recursive-rejection": (None, "recursive-rejection", "model"),
        "block-verification": (None, "block-verification", "model"),
        "prompt-lookup": (None, "shared-noise", "prompt-lookup"),
        "suffix": (None, "shared-noise", "suffix"),
    }
    assert len(set(clusters)) == len(clusters) - 1
    assert clusters[0] == clusters[1]
    assert progress == ["rows: starting the cluster", *(f"rows: starting {name}" for name in list(found)[2:])]


async def test_llama_cpp_rows_share_a_worker_with_the_models_of_other_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[Models] = []

    @asynccontextmanager
    async def running(config: ClusterConfig) -> AsyncIterator[Any]:
        yield Asked(config)

    @asynccontextmanager
    async def worker(models: Models) -> AsyncIterator[Any]:
        loaded.append(models)
        yield object()

    monkeypatch.setattr(suites, "running", running)
    monkeypatch.setattr(suites, "llama_worker", worker)
    monkeypatch.setattr(suites, "WORKERS", ())
    options = replace(OPTIONS, llama_cpp=True, rules=(), drafts=())
    async with suites.open_rows(options, tmp_path, "rows", lambda what: None) as rows:
        names = [row.name for row in rows]
    assert names == ["llama.cpp", "llama.cpp-draft-3", "llama.cpp-draft-6", "plain", "distributed"]
    assert loaded == [Models(tmp_path, options.models / "drafter", "float32", 1)]


async def test_every_prompt_is_sent_once() -> None:
    asked: list[tuple[int, ...]] = []

    class Row:
        name = "row"

        async def generate(self, ask: BenchRequest) -> Sample:
            asked.append(ask.prompt)
            return Sample((1,), (0.1,), 1)

    row: Any = Row()
    prompts = [(str(number), (number,)) for number in range(6)]
    options = replace(OPTIONS, repetitions=3, temperatures=(0.0, 1.0))
    takes = [take async for take in suites.interleaved(options, [row], prompts, 1, lambda what: None)]
    assert asked == [(number,) for number in range(6) for _ in options.temperatures]
    assert [take.repetition for take in takes] == [0] * 4 + [1] * 4 + [2] * 4


def test_drafter_flags_hold_for_drafters_without_a_model_too(tmp_path: Path) -> None:
    options = replace(OPTIONS, drafter={"threads": 3})
    (drafter,) = options.cluster(tmp_path, drafts="suffix").drafter
    assert (drafter.drafts, drafter.threads) == ("suffix", 3)
