"""A cluster at work writes what a drafter learns from: the texts that its target would write here."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Generator
from contextlib import closing
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import MAX_LOGPROBS
from outrider.engine.loading import load_engine
from outrider.errors import ConfigError
from outrider.fleet.cluster import LocalCluster
from outrider.training.answers.answer_store import TargetAnswer
from outrider.training.answers.dialogue import Dialogues, Prompt
from outrider.training.answers.remote_teacher import RemoteTeacher
from outrider.training.answers.teacher import TEMPERATURES, Teacher
from tests.training.answers.test_answers import TEMPLATE, settings
from tests.training.family import make_target, train

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = 24
COUNT = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template, whose turns end soon: with one of eight tokens."""
    folder = make_target(tmp_path_factory.mktemp("remote") / "target")
    for file, more in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("config.json", {"max_position_embeddings": 512}),
        ("generation_config.json", {"eos_token_id": [*range(0, 300, 8)]}),
    ):
        settings_of_it = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(settings_of_it | more), encoding="utf-8")
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def router(target: Path) -> AsyncIterator[str]:
    """The address of the router of a cluster that serves the target."""
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=8)],
    )
    async with LocalCluster(config) as cluster:
        yield cluster.router_address


def by_seed(texts: Generator[TargetAnswer | None]) -> dict[int, TargetAnswer]:
    """The first texts that were complete."""
    with closing(texts):
        found = islice((text for text in texts if text is not None), COUNT)
        return {text.seed: text for text in found}


async def test_a_cluster_writes_what_the_target_writes_here(target: Path, router: str) -> None:
    own = islice(Dialogues(target), 1)
    prompts = [*own, Prompt((5, 6, 7), None), Prompt((9, 10), None)] * 3
    engine = load_engine(target, dtype="float32", slots=len(prompts), rows=256, threads=1)
    here = by_seed(Teacher(engine, iter(prompts), first_seed=40, most=MOST).texts())
    there = await asyncio.to_thread(
        by_seed, RemoteTeacher(router, target, iter(prompts), first_seed=40, most=MOST).texts()
    )
    assert len(here) >= 6
    assert here.keys() == there.keys()
    assert {text.temperature for text in there.values()} == {*TEMPERATURES}
    assert any(text.asked.stop > text.asked.start for text in there.values())
    for seed, text in there.items():
        same = here[seed]
        assert np.array_equal(text.tokens, same.tokens)
        assert (text.asked, text.answer, text.temperature) == (same.asked, same.answer, same.temperature)
        assert np.array_equal(text.ids[:, :MAX_LOGPROBS], same.ids[:, :MAX_LOGPROBS])
        gaps = text.logprobs[:, :MAX_LOGPROBS].astype(float) - same.logprobs[:, :MAX_LOGPROBS]
        assert np.abs(gaps).max() < 1e-2
        assert (text.logprobs[:, MAX_LOGPROBS:] == -np.inf).all()


async def test_a_drafter_learns_from_what_a_cluster_writes(target: Path, router: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("say this\nsay that\n", encoding="utf-8")
    recipe = settings(target, tmp_path / "drafter", prompts=prompts, teacher=router, draft_vocabulary=120)
    training = await asyncio.to_thread(train, recipe)
    figures = [json.loads(line) for line in (tmp_path / "drafter.run" / "figures.jsonl").read_text().splitlines()]
    assert figures[-1]["held_out_loss"] < 0.95 * figures[0]["held_out_loss"]
    assert training.expected_gain() is None  # the target's passes are elsewhere


async def test_a_cluster_of_another_target_is_refused(target: Path, router: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree("models/target", other)
    texts = RemoteTeacher(router, other, repeat(Prompt((5,), None)), first_seed=0, most=4).texts()
    with pytest.raises(ConfigError, match=r"teacher: .* serves target, and has to serve one with the target's token"):
        await asyncio.to_thread(by_seed, texts)


async def test_a_cluster_that_cannot_be_reached_is_named(target: Path) -> None:
    texts = RemoteTeacher("127.0.0.1:1", target, repeat(Prompt((5,), None)), first_seed=0, most=4).texts()
    with pytest.raises(ConfigError, match=r"teacher: 127\.0\.0\.1:1: no router can be reached"):
        await asyncio.to_thread(by_seed, texts)
