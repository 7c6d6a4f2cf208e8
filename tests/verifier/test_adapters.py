"""The verifier's adapters: loaded once however many sessions wait, the least recently used one dropped."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from outrider.core.session.contract import Adapter
from outrider.engine.interface.engine import Engine
from outrider.errors import CheckpointError, Conflict, InvalidRequest, NotFound
from verifier_svc.adapters import AdapterStore


class Read(NamedTuple):
    digest: str
    rank: int = 4
    parameters: int = 10


class Disk:
    """An engine whose adapters are what `content` says."""

    def __init__(self) -> None:
        self.content = {name: name * 32 for name in "abc"}
        self.reads: list[str] = []
        self.release = threading.Event()
        self.release.set()

    def load_adapter(self, folder: Path) -> tuple[object, Read]:
        assert self.release.wait(10)
        self.reads.append(folder.name)
        if self.content[folder.name] == "broken":
            raise CheckpointError(f"{folder}: broken")
        return f"weights of {folder.name}", Read(self.content[folder.name])


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    for name in "abc":
        (tmp_path / name).mkdir()
    return Disk()


def store(disk: Disk, folder: Path | None, most: int = 2) -> AdapterStore:
    return AdapterStore(cast(Engine, disk), folder, most)


def adapter(name: str) -> Adapter:
    return Adapter(name, name * 32)


async def test_concurrent_sessions_with_one_adapter_load_it_once(disk: Disk, tmp_path: Path) -> None:
    adapters = store(disk, tmp_path)
    disk.release.clear()
    waiting = [asyncio.create_task(adapters.get(adapter("a"))) for _ in range(8)]
    await asyncio.sleep(0.05)
    disk.release.set()
    assert {*await asyncio.gather(*waiting)} == {"weights of a"}
    assert disk.reads == ["a"]
    assert await adapters.get(None) is None


async def test_the_least_recently_used_adapter_is_dropped(disk: Disk, tmp_path: Path) -> None:
    adapters = store(disk, tmp_path)
    for name in "abac":  # b is the least recently used one when c comes
        await adapters.get(adapter(name))
    assert (adapters.loaded, disk.reads) == (2, ["a", "b", "c"])
    await adapters.get(adapter("a"))
    await adapters.get(adapter("b"))
    assert disk.reads == ["a", "b", "c", "b"]


async def test_files_that_have_changed_are_no_longer_the_session_s_adapter(disk: Disk, tmp_path: Path) -> None:
    adapters = store(disk, tmp_path)
    await adapters.get(adapter("a"))
    disk.content["a"] = "e" * 32
    assert await adapters.get(adapter("a")) == "weights of a"  # it is in memory
    assert (await adapters.load("a")).digest == "e" * 32
    with pytest.raises(Conflict, match="'a' has changed"):
        await adapters.get(adapter("a"))


async def test_an_unreadable_adapter_is_refused_and_tried_again(disk: Disk, tmp_path: Path) -> None:
    adapters = store(disk, tmp_path)
    disk.content["b"] = "broken"
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="broken"):
            await adapters.get(adapter("b"))
    disk.content["b"] = "b" * 32
    assert await adapters.get(adapter("b")) == "weights of b"


@pytest.mark.parametrize("name", ["d", "..", ".", "", "a/../..", "/", "x" * 300, "a\0"])
async def test_no_name_leads_outside_the_adapter_folder(disk: Disk, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        await store(disk, tmp_path).load(name)
    (tmp_path / "link").symlink_to(tmp_path.parent)
    with pytest.raises(NotFound, match="no such folder"):
        await store(disk, tmp_path).load("link")
    (tmp_path / "inside").symlink_to(tmp_path / "a")  # perhaps another tenant's
    with pytest.raises(NotFound, match="no such folder"):
        await store(disk, tmp_path).load("inside")
    with pytest.raises(NotFound, match="--adapters"):
        await store(disk, None).load("a")
