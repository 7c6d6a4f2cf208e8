"""A drafter's trainer publishes what is better, judges what is doubted, and outlives what goes wrong around it."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from redis.asyncio import Redis

from outrider.core.session.training_samples import TrainingSample, sample_of
from outrider.engine.checkpoints.checkpoint import read_config, read_tokenizer_digest
from outrider.engine.checkpoints.model_card import read_card, weights_digest
from outrider.engine.loading import load_engine
from outrider.store.redis.client import connect
from outrider.store.training_samples import TrainingSampleStore
from outrider.store.versions import PublishedVersions, Version, Versions
from outrider.training.online import trainer
from outrider.training.online.model import OnlineModel
from outrider.training.online.replay import PASSES
from outrider.training.online.trainer import OnlineTrainingConfig, Trainer
from tests.e2e.tiny_models import VOCABULARY, make_tiny
from tests.engine.small_checkpoints import keep_ids
from tests.full_disk import small_disk
from tests.store.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a drafter that has yet to learn from it."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder / "target", layers=1, width=32)
    make_tiny(folder / "drafter", layers=1, width=32, astray=0.6)
    return folder


@pytest.fixture(scope="module")
def examples(models: Path) -> list[TrainingSample]:
    """Samples: what the target predicts for texts drawn at random."""
    target = OnlineModel(models / "target").model.eval()
    texts = torch.randint(0, VOCABULARY, (80, 80), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        top = torch.log_softmax(target(texts).logits[:, 15:-1], -1).topk(8)
    return [
        sample_of(text.tolist(), ids.numpy(), logprobs.numpy())
        for text, ids, logprobs in zip(texts, top.indices, top.values, strict=True)
    ]


class Rig:
    def __init__(self, models: Path, output: Path, client: Redis) -> None:
        digest = read_tokenizer_digest(models / "target")
        self.course = OnlineTrainingConfig(
            models / "drafter", "drafter", "target", output, share=1.0, rate=3e-3, batch=8, every=10
        )
        self.versions = Versions(client, "drafter")
        self.stream = TrainingSampleStore(client, "target", digest)
        self.client = client

    @asynccontextmanager
    async def training(self) -> AsyncIterator[Trainer]:
        trainer = Trainer(self.course, self.client)
        running = asyncio.create_task(trainer.run())
        try:
            yield trainer
        finally:
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()

    async def until(self, holds: Callable[[PublishedVersions], bool]) -> PublishedVersions:
        async with asyncio.timeout(30):
            while True:
                published = await self.versions.read()
                if holds(published):
                    return published
                await asyncio.sleep(0.02)

    def version(self, number: int, folder: Path) -> Version:
        return Version(number, str(folder), weights_digest(folder), "target", "", "")


@pytest.fixture
async def rig(models: Path, tmp_path: Path, redis_url: str) -> AsyncIterator[Rig]:
    async with aclosing(connect(redis_url)) as client:
        assert isinstance(client, Redis)
        yield Rig(models, tmp_path / "made", client)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "POLL_S", 0.02)


def ran(*command: str | Path) -> bool:
    return subprocess.run(command, check=False).returncode == 0


async def test_a_model_with_better_agreement_is_published_with_a_loadable_card(
    rig: Rig, examples: list[TrainingSample]
) -> None:
    await rig.stream.add(examples)
    async with rig.training():
        published = await rig.until(lambda published: bool(published.usable))
    version = published.usable[-1]
    folder = Path(version.folder)
    card = read_card(folder)
    assert card is not None
    assert (card.target, card.version, card.kind) == ("target", version.number, "drafter")
    assert version.weights == weights_digest(folder)
    engine = load_engine(folder, dtype="bfloat16", slots=1)
    assert engine.vocabulary == VOCABULARY
    held = examples[-16:]
    assert OnlineModel(folder).score(held).mean > OnlineModel(rig.course.model).score(held).mean + 0.02


def test_the_average_over_steps_is_judged_and_saved(
    models: Path, examples: list[TrainingSample], tmp_path: Path
) -> None:
    follower, in_use = (OnlineModel(models / "drafter", rate=3e-3) for _ in range(2))
    stages = [deepcopy(follower.model.state_dict())]
    for _ in range(3):
        follower.learn(examples[:8], in_use)
        stages.append(deepcopy(follower.learning.state_dict()))
    follower.save(tmp_path / "learned")
    weights = (1 / 11 * 2 / 12 * 3 / 13, 10 / 11 * 2 / 12 * 3 / 13, 10 / 12 * 3 / 13, 10 / 13)  # young ones forget more
    for name, saved in OnlineModel(tmp_path / "learned").model.state_dict().items():
        average = sum(weight * stage[name] for weight, stage in zip(weights, stages, strict=True))
        torch.testing.assert_close(follower.model.state_dict()[name], average)
        assert torch.equal(saved, follower.model.state_dict()[name].bfloat16().float())
    assert not torch.equal(stages[0]["lm_head.weight"], stages[1]["lm_head.weight"])


def test_a_drafter_of_some_ids_learns(models: Path, examples: list[TrainingSample], tmp_path: Path) -> None:
    ids = tuple(range(0, VOCABULARY, 2))
    drafter = keep_ids(models / "drafter", tmp_path / "reduced", ids)
    follower, in_use = (OnlineModel(drafter, rate=3e-3) for _ in range(2))
    before = follower.score(examples[:16]).mean
    for step in range(20):
        assert math.isfinite(follower.learn(examples[16 + 2 * step : 24 + 2 * step], in_use))
    assert follower.score(examples[:16]).mean > before + 0.005
    follower.save(tmp_path / "learned")
    assert read_config(tmp_path / "learned").draft_ids == ids
    assert OnlineModel(tmp_path / "learned").score(examples[:16]).mean > before + 0.005


async def test_the_trainer_rests_without_new_samples_and_keeps_to_its_share(
    rig: Rig, examples: list[TrainingSample]
) -> None:
    rig.course = replace(rig.course, share=0.2, every=1000)
    async with rig.training() as trainer:
        await asyncio.sleep(0.3)
        assert trainer.steps == 0
        await rig.stream.add(examples)
        began, worked = time.monotonic(), [0.0]
        while time.monotonic() < began + 2.0:
            await asyncio.sleep(0.005)
            if trainer.seconds > worked[-1]:
                worked.append(trainer.seconds)
        spent = time.monotonic() - began
        assert len(worked) > 3
        longest = max(after - before for before, after in itertools.pairwise(worked))
        assert trainer.seconds <= 0.2 * spent + 0.8 * longest  # the last work's rest may not have come yet


async def test_a_killed_trainer_continues_from_the_version_in_use_and_learns_no_sample_twice(
    rig: Rig, examples: list[TrainingSample]
) -> None:
    await rig.stream.add(examples)
    async with rig.training():
        await rig.until(lambda published: bool(published.usable))
    published = await rig.versions.read()
    (rig.course.output / "versions" / ".00001.new").mkdir()  # what a kill leaves behind
    async with rig.training() as trainer:
        while trainer.number != published.latest:
            await asyncio.sleep(0.01)
        assert trainer.replay.held_back
        assert trainer.replay.token_budget <= PASSES * 64 * 17  # what came behind the place that it had noted
        await rig.stream.add(examples[:20])
        while not trainer.steps:
            await asyncio.sleep(0.01)


async def test_a_full_disk_delays_versions_until_space_is_free(
    rig: Rig, examples: list[TrainingSample], caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(rig.course.output, "8k") as disk:
        await rig.stream.add(examples)
        async with rig.training():
            async with asyncio.timeout(30):
                while "nothing is published for now" not in caplog.text:
                    await asyncio.sleep(0.02)
            assert not (await rig.versions.read()).known
            assert ran("mount", "-o", "remount,size=8m", disk)
            await rig.stream.add(examples)
            version = (await rig.until(lambda published: bool(published.usable))).usable[0]
        assert weights_digest(Path(version.folder)) == version.weights


async def test_versions_that_redis_lost_are_announced_again(
    models: Path, tmp_path: Path, examples: list[TrainingSample]
) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    with Server(folder, appendonly="no") as server:
        async with aclosing(connect(server.url)) as client:
            assert isinstance(client, Redis)
            rig = Rig(models, tmp_path / "made", client)
            rig.course = replace(rig.course, every=40)
            await rig.stream.add(examples)
            async with rig.training() as trainer:
                await rig.until(lambda published: bool(published.usable))
                server.kill()
                await asyncio.sleep(0.2)
                server.start()
                published = await rig.until(lambda published: bool(published.usable))
                assert trainer.number == published.usable[0].number


async def test_new_texts_decide_about_a_doubted_version(rig: Rig, models: Path, examples: list[TrainingSample]) -> None:
    make_tiny(rig.course.output / "wild", layers=1, width=32, astray=5.0)
    await rig.stream.add(examples)
    rig.course = replace(rig.course, every=10_000)
    await rig.versions.publish(rig.version(1, models / "target"))
    await rig.versions.publish(rig.version(2, rig.course.output / "wild"))
    async with rig.training() as trainer:
        await rig.versions.doubt(1, "it seems worse")
        await rig.versions.doubt(2, "it seems worse")
        published = await rig.until(lambda published: not published.in_question)
        assert list(published.cleared) == [1]
        assert list(published.withdrawn) == [2]
        while trainer.number != 1:
            await asyncio.sleep(0.01)


async def test_samples_of_another_vocabulary_are_ignored(rig: Rig, examples: list[TrainingSample]) -> None:
    wrong = replace(examples[0], ids=np.full_like(examples[0].ids, VOCABULARY))
    await rig.stream.add([wrong] * 20)
    async with rig.training() as trainer:
        while trainer.stream_position == "0":
            await asyncio.sleep(0.01)
        assert not trainer.replay.held_back
    assert not rig.course.output.exists()
