"""A drafter goes over to versions that fit, judges them by what they agree, and goes back when they are withdrawn."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from drafter_svc import hot_reload
from drafter_svc.hot_reload import FIRST_COMPARISON, HotReload, RequiredShape
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.loading import outline
from outrider.store.redis.client import connect
from outrider.store.versions import Version, Versions

MODELS = Path(__file__).parents[2] / "models"


class Grower:
    """Stands where a drafter's loop does."""

    def __init__(self) -> None:
        self.folders: list[Path] = []  # of the engines that it was given
        self.members = self.fits = self
        self.agreed = self.compared = 0

    def replace_engine(self, engine: Any) -> None:
        self.folders.append(engine)

    def agreement(self) -> dict[str, tuple[int, int]]:
        return {"warm": (self.agreed, self.compared)}


class Rig:
    """A learner whose engines are the names of their folders."""

    def __init__(self, folders: list[Path], redis: Any) -> None:
        self.folders = folders
        self.redis = redis
        self.versions = versions = Versions(redis, "drafter")
        self.scheduler = Grower()
        shape = outline(folders[0])
        own = RequiredShape(folders[0], read_tokenizer_digest(folders[0]), shape.vocabulary, shape.context, "")
        scheduler, load = self.scheduler, lambda folder: folder
        self.hot_reload = HotReload(scheduler, versions, own, load)  # type: ignore[arg-type]

    async def publish(self, number: int, *, weights: str = "") -> None:
        folder = self.folders[number]
        digest = weights or weights_digest(folder)
        await self.versions.publish(Version(number, str(folder), digest, "target", "", ""))

    async def agree(self, share: float) -> None:
        """The present version agrees in that share of positions."""
        self.scheduler.agreed += round(share * 4 * FIRST_COMPARISON)
        self.scheduler.compared += 4 * FIRST_COMPARISON
        await self.hot_reload.poll()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A drafter's own, and two versions of it."""
    folders = [tmp_path_factory.mktemp("versions") / str(number) for number in range(3)]
    for number, folder in enumerate(folders):
        shutil.copytree(MODELS / "drafter", folder)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] += number
        save_file(weights, folder / "model.safetensors")
    return folders


@pytest_asyncio.fixture
async def rig(folders: list[Path], redis_url: str) -> AsyncIterator[Rig]:
    async with aclosing(connect(redis_url)) as client:
        yield Rig(folders, client)


async def test_the_latest_that_was_not_withdrawn_is_drafted_with_and_at_last_the_own_folder(rig: Rig) -> None:
    await rig.hot_reload.poll()
    assert rig.scheduler.folders == []
    for number in (1, 2):
        await rig.publish(number)
        await rig.hot_reload.poll()
    for number in (2, 1):
        await rig.versions.withdraw(number, "worse")
        await rig.hot_reload.poll()
        await rig.hot_reload.poll()
    assert rig.scheduler.folders == [rig.folders[number] for number in (1, 2, 1, 0)]
    assert (rig.hot_reload.number, rig.hot_reload.swaps, rig.hot_reload.rollbacks) == (0, 4, 2)


async def test_a_version_whose_weights_do_not_match_is_not_used(rig: Rig) -> None:
    """The folder has been written over, or is not there as a whole yet."""
    await rig.publish(1)
    await rig.publish(2, weights="00" * 16)
    await rig.hot_reload.poll()
    assert rig.scheduler.folders == [rig.folders[1]]


async def test_a_version_that_redis_lost_stays_in_use(rig: Rig) -> None:
    await rig.publish(1)
    await rig.hot_reload.poll()
    await rig.redis.flushall()
    await rig.hot_reload.poll()
    assert (rig.hot_reload.number, rig.scheduler.folders) == (1, [rig.folders[1]])


async def test_a_doubt_without_a_verdict_withdraws_its_version(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_reload, "VERDICT_S", 0.05)
    await rig.publish(1)
    await rig.publish(2)
    await rig.versions.doubt(1, "why")
    await rig.versions.doubt(2, "why")
    await rig.versions.clear(1, "it is good")
    await rig.hot_reload.poll()
    assert (await rig.versions.read()).withdrawn == {}
    await asyncio.sleep(0.06)
    await rig.hot_reload.poll()
    assert (await rig.versions.read()).withdrawn == {2: "why"}
    await rig.hot_reload.poll()
    assert rig.hot_reload.number == 1


@pytest.mark.parametrize(("before", "now", "doubted"), [(0.9, 0.5, [2]), (0.5, 0.9, []), (0.9, 0.9, [])])
async def test_a_version_is_doubted_that_agrees_less_than_the_one_before_did(
    rig: Rig, before: float, now: float, doubted: list[int]
) -> None:
    await rig.publish(1)
    await rig.hot_reload.poll()
    await rig.agree(before)
    await rig.publish(2)
    await rig.hot_reload.poll()
    await rig.agree(now)
    assert [*(await rig.versions.read()).doubted] == doubted


async def test_a_version_that_was_cleared_is_not_held_against_the_one_before_again(rig: Rig) -> None:
    """It is the traffic that has changed."""
    await rig.publish(1)
    await rig.hot_reload.poll()
    await rig.agree(0.9)
    await rig.publish(2)
    await rig.versions.clear(2, "the traffic has changed")
    await rig.hot_reload.poll()
    await rig.agree(0.5)
    assert (await rig.versions.read()).doubted == {}
