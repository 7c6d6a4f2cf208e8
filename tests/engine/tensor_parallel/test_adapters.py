"""Adapters of a model that ranks share: the logits of one rank; pieces beside passes; one that fails ends no group."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import LlamaConfig

from outrider.engine.adapters.low_rank import FILES, TENSORS, AdapterFiles, LowRankAdapter, read_adapter
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.cpu.weights import CpuAdapters
from outrider.engine.executor import Executor
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel import adapter_transfer
from outrider.engine.tensor_parallel.adapter_transfer import AdapterInbox
from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.tensor_parallel.leader import BEAT_S, follow, lead
from outrider.engine.tensor_parallel.rank_messages import AdapterPiece, Change, DropAdapter, decode
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.tensor_parallel.socket_group import SocketGroup
from outrider.errors import CheckpointError, Unavailable
from tests.engine.ranked import leading, meet, meeting_point, ranked
from tests.engine.small_adapters import make_adapter
from tests.engine.small_checkpoints import SHAPES, Tree, assert_same, make_checkpoint, prompt, random_tokens

FFN = 96  # three and four ranks can share this width
ORDER = [0, None, 1, 0]  # adapters of the segments of a mixed pass
LENGTHS = (5, 40, 1, 23)


class Loading(ThreadPoolExecutor):
    """Loads adapters beside passes, as a verifier does."""

    def __init__(self) -> None:
        super().__init__(1, "loading")

    def begin(self, engine: Engine, folder: Path) -> Future[tuple[object, LowRankAdapter]]:
        return self.submit(engine.load_adapter, folder)


def load(engine: Engine, folder: Path) -> object:
    """An adapter, sent with the heartbeats of an idle group."""
    with Loading() as pool:
        loading = pool.begin(engine, folder)
        while not loading.done():
            engine.heartbeat()
        return loading.result()[0]


def beat(engine: Engine, times: int | None) -> None:
    """None: until the group ends."""
    for _ in itertools.count() if times is None else range(times):
        engine.heartbeat()


def mixed(engine: Engine, adapters: Sequence[object], wanted: int | None = None) -> list[Segment]:
    """Texts with two adapters and without one."""
    random = np.random.default_rng(3)
    return [
        replace(
            prompt(slot, random_tokens(engine, random, length), wanted=wanted),
            adapter=None if which is None else adapters[which],
        )
        for slot, (length, which) in enumerate(zip(LENGTHS, ORDER, strict=True))
    ]


def steps(engine: Engine, adapters: Sequence[object]) -> list[NDArray[np.float32]]:
    """Mixed passes over prompts, and over a tree behind one of them."""
    random = np.random.default_rng(4)
    found = [engine.forward(mixed(engine, adapters)), engine.forward(mixed(engine, adapters, wanted=1))]
    tree = Tree.random(engine, random, 12).segment(3, LENGTHS[3])
    beside = prompt(1, random_tokens(engine, random, 2), LENGTHS[1])
    return [*found, engine.forward([replace(tree, adapter=adapters[0]), beside])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), ffn=FFN)


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_two(checkpoint, tmp_path_factory.mktemp("adapters"))


def make_two(checkpoint: Path, folder: Path) -> list[Path]:
    """An adapter of all linears, and one of some, whose rank is larger than a rank's part of some inputs."""
    return [
        make_adapter(checkpoint, folder / "all", seed=1),
        make_adapter(
            checkpoint, folder / "some", seed=2, modules=("v_proj", "o_proj", "up_proj", "down_proj"), rank=40
        ),
    ]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Change], list[Segment]]]:
    """The messages of rank 0."""
    found: list[tuple[list[Change], list[Segment]]] = []
    send = SocketGroup.send

    def record(group: SocketGroup, message: NDArray[np.uint8]) -> None:
        if len(message) != 1:
            found.append(decode(message))
        send(group, message)

    monkeypatch.setattr(SocketGroup, "send", record)
    return found


def pieces(messages: Sequence[tuple[list[Change], list[Segment]]]) -> list[AdapterPiece]:
    return [change for changes, _ in messages for change in changes if isinstance(change, AdapterPiece)]


@pytest.mark.parametrize(
    ("shape", "of"),
    [("grouped", 2), ("six-heads", 3), ("one-kv-head-llama3", 4), ("biased", 2), ("narrow-heads", 4), ("qwen3", 2)],
)
def test_several_ranks_add_the_adapter_updates_of_one_rank(
    shape: str, of: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    monkeypatch.setitem(SHAPES, "six-heads", (LlamaConfig, sizes))
    folder = make_checkpoint(tmp_path / "model", shape, FFN)
    folders = make_two(folder, tmp_path)
    alone = CpuEngine.load(folder, EngineSettings(dtype="float32", slots=4, threads=1))
    expected = steps(alone, [alone.load_adapter(it)[0] for it in folders])
    plain = alone.forward([replace(it, adapter=None) for it in mixed(alone, (None, None))])
    changed = np.abs(expected[0] - plain).max(1) > 0.01
    assert changed.tolist() == np.repeat([which is not None for which in ORDER], LENGTHS).tolist()
    with leading(folder, of) as engine:
        for ours, theirs in zip(steps(engine, [load(engine, it) for it in folders]), expected, strict=True):
            assert_same(ours, theirs)


def test_torch_ranks_add_the_adapter_updates_of_one_rank(checkpoint: Path, folders: list[Path]) -> None:
    alone = CpuEngine.load(checkpoint, EngineSettings(dtype="float32", slots=4, threads=1))
    expected = steps(alone, [alone.load_adapter(it)[0] for it in folders])
    with ranked(2, checkpoint, by="torch", adapters=len(folders)) as ranks, ranks.lead(checkpoint) as engine:
        for ours, theirs in zip(steps(engine, [load(engine, it) for it in folders]), expected, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_rows_bits_do_not_depend_on_the_adapters_of_other_rows(
    dtype: str, checkpoint: Path, folders: list[Path]
) -> None:
    with leading(checkpoint, 2, dtype=dtype) as engine:
        segments = mixed(engine, [load(engine, it) for it in folders])
        together = engine.forward(segments)
        assert np.array_equal(together, np.concatenate([engine.forward([it]) for it in segments]))


def test_every_part_of_an_adapter_is_on_one_rank(checkpoint: Path, folders: list[Path]) -> None:
    config = read_config(checkpoint)
    complete = read_adapter(folders[0], config)
    parts = [Shard(rank, 2).adapter(complete, config) for rank in range(2)]
    assert Shard().adapter(complete, config) is complete
    for layer, updates in complete.layers.items():
        for module, update in updates.items():
            of_ranks = [part.layers[layer][module] for part in parts]
            split_inputs = module in ("o_proj", "down_proj")
            assert all((np.array_equal(it.b, update.b)) == split_inputs for it in of_ranks)
            joined = np.concatenate([it.a if split_inputs else it.b for it in of_ranks], int(split_inputs))
            assert np.array_equal(joined, update.a if split_inputs else update.b)


def test_passes_continue_while_each_sends_a_piece_of_an_adapter(
    checkpoint: Path, folders: list[Path], messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_transfer, "PIECE", 1000)
    with leading(checkpoint, 2) as engine, Loading() as pool:
        text = random_tokens(engine, np.random.default_rng(5), 30)
        expected = engine.forward([prompt(0, text)])
        loading = pool.begin(engine, folders[0])
        while not loading.done():
            assert np.array_equal(engine.forward([prompt(0, text)]), expected)
        adapter, read = loading.result()
        sent = pieces(messages)
        contents = [b"".join(it.content.tobytes() for it in sent if it.file == file) for file in range(len(FILES))]
        assert contents == [(folders[0] / name).read_bytes() for name in FILES]
        assert [it.last for it in sent] == [False] * (len(sent) - 1) + [True]
        assert max(len(pieces([message])) for message in messages) == 1
        assert all(segments for _, segments in messages)
        changed = engine.forward([replace(prompt(1, text), adapter=adapter)])
    alone = CpuEngine.load(checkpoint, EngineSettings(dtype="float32", slots=4, threads=1))
    one, again = alone.load_adapter(folders[0])
    assert read.digest == again.digest
    assert_same(changed, alone.forward([replace(prompt(1, text), adapter=one)]))


async def test_an_idle_group_sends_piece_after_piece_and_then_rests(
    checkpoint: Path, folders: list[Path], messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_transfer, "PIECE", 1000)
    with leading(checkpoint, 2) as engine:
        executor, woken = Executor(engine), asyncio.Event()
        idle = asyncio.create_task(executor.wait_idle(woken))
        began = time.monotonic()
        adapter, _ = await asyncio.to_thread(engine.load_adapter, folders[0])
        took = time.monotonic() - began
        sent = len(pieces(messages))
        assert sent > 30
        assert took < 0.5 * sent * BEAT_S  # one each second would take as many seconds
        assert engine.heartbeat_s == BEAT_S
        woken.set()
        await idle
        text = np.arange(9)
        found = await executor.call(lambda: engine.forward([replace(prompt(0, text), adapter=adapter)]))
    alone = CpuEngine.load(checkpoint, EngineSettings(dtype="float32", slots=4, threads=1))
    one, _ = alone.load_adapter(folders[0])
    assert_same(found, alone.forward([replace(prompt(0, text), adapter=one)]))


def test_an_adapter_is_dropped_on_all_ranks_with_its_last_reference(
    checkpoint: Path, folders: list[Path], messages: list[Any]
) -> None:
    with leading(checkpoint, 2) as engine:
        first, second = (load(engine, folder) for folder in folders)
        segments = mixed(engine, (first, second))
        expected = engine.forward(segments)
        del first
        engine.heartbeat()  # segments still have it
        assert not dropped(messages)
        segments = [it for it in segments if it.adapter is second]
        gc.collect()
        engine.heartbeat()
        assert dropped(messages) == [0]
        assert np.array_equal(engine.forward(segments), expected[sum(LENGTHS[:2]) : sum(LENGTHS[:3])])
        third = load(engine, folders[0])  # has another number
        assert np.array_equal(engine.forward(mixed(engine, (third, second))), expected)


def dropped(messages: Sequence[tuple[list[Change], list[Segment]]]) -> list[int]:
    return [change.number for changes, _ in messages for change in changes if isinstance(change, DropAdapter)]


@pytest.mark.parametrize("problem", ["foreign", "missing", "large"])
def test_an_invalid_adapter_is_refused_and_the_group_continues(
    problem: str,
    checkpoint: Path,
    folders: list[Path],
    messages: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on one rank, or because of the ranks; no other rank receives anything of it."""
    folder, match = folders[0], ""
    match problem:
        case "foreign":
            other = make_checkpoint(tmp_path / "other", "untied-wide-heads", FFN)
            folder, match = make_adapter(other, tmp_path / "adapter"), "has shape"
        case "missing":
            folder, match = tmp_path / "nothing", "no such folder"
        case "large":
            monkeypatch.setattr(adapter_transfer, "MOST_BYTES", 10_000)
            match = r"up to 10000 bytes, and this one has \d+; train it with a smaller rank"
    with leading(checkpoint, 2) as engine:
        text = random_tokens(engine, np.random.default_rng(6), 9)
        expected = engine.forward([prompt(0, text)])
        with pytest.raises(CheckpointError, match=match):
            engine.load_adapter(folder)
        engine.heartbeat()
        assert not pieces(messages)
        assert np.array_equal(engine.forward([prompt(0, text)]), expected)


def test_all_ranks_load_the_adapter_bytes_that_rank_0_read_once(
    checkpoint: Path, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the files are others from the moment on in which rank 0 packs its part."""
    alone = CpuEngine.load(checkpoint, EngineSettings(dtype="float32", slots=4, threads=1))
    segments = mixed(alone, [alone.load_adapter(it)[0] for it in (folders[0], folders[0])])
    expected = alone.forward(segments)
    folder = Path(shutil.copytree(folders[0], tmp_path / "adapter"))
    pack = CpuAdapters.pack

    def pack_and_replace(adapters: CpuAdapters, files: AdapterFiles) -> tuple[object, LowRankAdapter]:
        for name in FILES if files.folder == folder else ():
            shutil.copy(folders[1] / name, folder / name)
        return pack(adapters, files)

    monkeypatch.setattr(CpuAdapters, "pack", pack_and_replace)
    with leading(checkpoint, 2) as engine:
        adapter = load(engine, folder)
        assert (folder / TENSORS).read_bytes() == (folders[1] / TENSORS).read_bytes()
        assert_same(engine.forward(mixed(engine, (adapter, adapter))), expected)


def test_an_adapter_of_another_engine_is_refused_before_a_plan_is_sent(
    checkpoint: Path, folders: list[Path], messages: list[Any]
) -> None:
    alone = CpuEngine.load(checkpoint, EngineSettings(dtype="float32", slots=4, threads=1))
    own, _ = alone.load_adapter(folders[0])
    with leading(checkpoint, 2) as engine, leading(checkpoint, 2) as other:
        for given in (own, "name", load(other, folders[0])):
            before = len(messages)
            with pytest.raises(ValueError, match="an adapter of another engine"):
                engine.forward([replace(prompt(0, np.arange(3)), adapter=given)])
            assert len(messages) == before
        assert engine.forward([prompt(0, np.arange(3))]).shape == (3, 131)


def test_a_load_times_out_and_can_be_tried_again(
    checkpoint: Path, folders: list[Path], messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with leading(checkpoint, 2) as engine:
        with monkeypatch.context() as changed:
            changed.setattr(adapter_transfer, "TAKE_S", 0.1)
            changed.setattr(adapter_transfer, "PIECE", 1000)
            with Loading() as pool:
                loading = pool.begin(engine, folders[0])
                while not pieces(messages):
                    engine.heartbeat()  # and then none
                with pytest.raises(Unavailable, match=r"neither a pass nor a heartbeat for 0\.1 s"):
                    loading.result()
        engine.heartbeat()
        assert dropped(messages) == [0]
        begun = len(pieces(messages))
        engine.heartbeat()
        assert len(pieces(messages)) == begun
        adapter = load(engine, folders[0])
        assert np.isfinite(engine.forward([replace(prompt(0, np.arange(3)), adapter=adapter)])).all()


def test_a_closed_group_fails_pending_adapter_loads(checkpoint: Path, folders: list[Path]) -> None:
    with leading(checkpoint, 2) as engine, Loading() as pool:
        loading = pool.begin(engine, folders[0])
        with pytest.raises(TimeoutError):
            loading.result(0.3)
        engine.close()
        with pytest.raises(RankLost, match="has been closed"):
            loading.result(10)
        with pytest.raises(RankLost, match="has been closed"):
            engine.load_adapter(folders[0])


def test_a_lost_rank_fails_pending_adapter_loads(checkpoint: Path, folders: list[Path]) -> None:
    with (
        ranked(2, checkpoint, timeout_s=2.0) as ranks,
        ranks.lead(checkpoint) as engine,
        Loading() as pool,
    ):
        engine.heartbeat()
        assert ranks.others[0].pid is not None
        os.kill(ranks.others[0].pid, signal.SIGKILL)
        loading = pool.begin(engine, folders[0])
        with pytest.raises(RankLost, match="rank 0 of 2 has lost another one"):
            beat(engine, 10)  # the first ones may still reach the connection's buffer
        with pytest.raises(RankLost, match="rank 0 of 2 has lost another one"):
            loading.result(10)


def test_a_rank_that_cannot_load_an_adapter_of_rank_0_ends_with_the_reason(
    checkpoint: Path,
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nothing/here")
    first, second = (it.result() for it in meet(2, meeting_point()))
    settings: Any = {"dtype": "float32", "slots": 4, "threads": 1}

    def follow_and_close() -> None:
        try:
            follow(CpuEngine.load(checkpoint, EngineSettings(group=second, **settings)), second)
        finally:
            second.close()

    with ThreadPoolExecutor(1) as pool, Loading() as loader, caplog.at_level(logging.ERROR):
        following = pool.submit(follow_and_close)
        engine = lead(CpuEngine.load(checkpoint, EngineSettings(group=first, **settings)), first)
        loader.begin(engine, folders[0])
        with pytest.raises(RankLost, match="rank 0 of 2 has lost another one"):
            beat(engine, None)  # the adapter is read beside, which takes its time on a busy machine
        with pytest.raises(Unavailable, match=r"rank 1 of 2 cannot load an adapter that rank 0 could: .*/nothing/here"):
            following.result(10)
    assert "rank 1 of 2 cannot load an adapter: FileNotFoundError: " in caplog.text
    first.close()


class Held:
    """An engine whose adapters are the names of their files, once it is released, or cannot be loaded."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.release = threading.Event()
        self.begun = threading.Event()

    def load_adapter(self, folder: Path) -> tuple[object, None]:
        self.begun.set()
        assert self.release.wait(10)
        if self.failure is not None:
            raise self.failure
        return sorted(it.name for it in folder.iterdir()), None


def inbox(engine: Held) -> AdapterInbox:
    return AdapterInbox(engine, "rank 1 of 2")  # type: ignore[arg-type]


def piece(number: int, file: int, *, last: bool = False, size: int = 10) -> AdapterPiece:
    return AdapterPiece(number, file, np.zeros(size, np.uint8), last)


def test_a_pass_waits_only_for_the_adapters_that_it_uses() -> None:
    engine = Held()
    adapters = inbox(engine)
    for each in (piece(0, 0), piece(0, 1, last=True), piece(1, 0)):
        adapters.apply(each)
    assert engine.begun.wait(10)
    plain = [prompt(0, np.arange(3))]
    assert adapters.with_adapters(plain) is plain
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(adapters.with_adapters, [*plain, replace(prompt(1, np.arange(3)), adapter=0)])
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        engine.release.set()
        assert [it.adapter for it in waiting.result(10)] == [None, sorted(FILES)]
    adapters.close()


def test_a_pass_waiting_for_an_adapter_fails_when_it_cannot_be_loaded() -> None:
    engine = Held(MemoryError("no more"))
    adapters = inbox(engine)
    adapters.apply(piece(0, 0, last=True))
    assert engine.begun.wait(10)
    adapters.check()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(adapters.with_adapters, [replace(prompt(1, np.arange(3)), adapter=0)])
        engine.release.set()
        with pytest.raises(
            Unavailable, match=r"rank 1 of 2 cannot load .*: MemoryError: no more; give each rank memory"
        ):
            waiting.result(10)
    with pytest.raises(Unavailable, match="MemoryError"):
        adapters.check()
    adapters.apply(DropAdapter(0))
    adapters.check()


def test_threads_of_adapters_that_are_dropped_or_never_complete_end() -> None:
    engine = Held()
    engine.release.set()
    before = {*threading.enumerate()}
    adapters = inbox(engine)
    for number in range(3):
        adapters.apply(piece(number, 0))
    adapters.apply(piece(1, 1, last=True))
    adapters.apply(DropAdapter(0))
    adapters.apply(DropAdapter(9))  # no piece of this adapter came
    assert [it.adapter for it in adapters.with_adapters([replace(prompt(0, np.arange(3)), adapter=1)])] == [
        sorted(FILES)
    ]
    waiting = {*threading.enumerate()} - before
    adapters.close()
    for thread in waiting:
        thread.join(10)
    assert not any(thread.is_alive() for thread in waiting)
    assert engine.begun.is_set()


def test_pieces_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_transfer, "MOST_BYTES", 25)
    adapters = inbox(Held())
    adapters.apply(piece(0, 0))
    adapters.apply(piece(0, 1))
    with pytest.raises(Unavailable, match="rank 1 of 2 has received more than 25 bytes of an adapter"):
        adapters.apply(piece(0, 1))
    adapters.close()
