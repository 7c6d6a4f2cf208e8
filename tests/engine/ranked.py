"""A tensor-parallel group on this machine: rank 0 here, the others in processes of their own or in threads."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEagleDrafts, DeviceEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.engine.tensor_parallel.group import ALONE, Group, RankLost
from outrider.engine.tensor_parallel.leader import follow, lead
from outrider.engine.tensor_parallel.process_group import TorchRanks
from outrider.engine.tensor_parallel.socket_group import SocketGroup

Connected = Literal["sockets", "torch"]  # ranks of compiled engines, or of those on torch
LOADING = {"dtype": "float32", "slots": 8, "threads": 1}


def connect(by: Connected, rank: int, of: int, meeting: str, timeout_s: float) -> SocketGroup | TorchRanks:
    """This rank's end of the group."""
    if by == "sockets":
        return SocketGroup(rank, of, meeting, timeout_s=timeout_s, rendezvous_s=30.0)
    return TorchRanks(rank, of, meeting.partition("#")[0], timeout_s=timeout_s)


def meeting_point() -> str:
    """An address that no process listens on yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}#secret"


def load(folder: Path, group: Group, loading: dict[str, Any]) -> Engine:
    """A rank's engine: the device's where `loading` names one."""
    if "device" not in loading:
        return load_engine(folder, group=group, **loading)
    assert isinstance(group, TorchRanks)
    left_out = ("threads",) if group.shard.rank == 0 else ("threads", "heads")
    engine = DeviceEngine.load(
        folder, EngineSettings(group=group, **{it: value for it, value in loading.items() if it not in left_out})
    )
    if engine.eagle is not None:
        DeviceEagleDrafts(engine)
    return engine


def follow_along(
    by: Connected, folders: Sequence[Path], rank: int, of: int, meeting: str, timeout_s: float, loading: Any
) -> None:
    """A rank's whole life; its exit status is 3 when it lost another one."""
    torch.set_num_threads(1)
    group = connect(by, rank, of, meeting, timeout_s)
    try:
        for folder in folders:
            follow(load(folder, group, loading), group)
        group.close()
    except RankLost:
        raise SystemExit(3) from None


@dataclass
class Ranked:
    """A group as its rank 0 sees it."""

    group: SocketGroup | TorchRanks
    loading: dict[str, Any]
    others: list[BaseProcess]

    @contextmanager
    def lead(self, folder: Path) -> Iterator[Engine]:
        """The whole of the next checkpoint."""
        leader = lead(load(folder, self.group, self.loading), self.group)
        try:
            yield leader
        finally:
            leader.close()


@contextmanager
def ranked(
    of: int, *folders: Path, by: Connected = "sockets", timeout_s: float = 30.0, **changes: Any
) -> Iterator[Ranked]:
    """Ranks that load the checkpoints one after another."""
    meeting, loading = meeting_point(), LOADING | changes
    spawn = multiprocessing.get_context("spawn")
    others: list[BaseProcess] = [
        spawn.Process(target=follow_along, args=(by, folders, rank, of, meeting, timeout_s, loading), daemon=True)
        for rank in range(1, of)
    ]
    for process in others:
        process.start()
    try:
        group = connect(by, 0, of, meeting, timeout_s)
        try:
            yield Ranked(group, loading, others)
        finally:
            group.close()
    finally:
        for process in others:
            process.join(5)
            process.kill()
            process.join()


def grown(folder: Path, rank: int, of: int, meeting: str, answer: Connection) -> None:
    """Loads a rank's part and runs a pass in a process of its own; answers by how much its memory grew."""
    torch.set_num_threads(1)
    group: Group = connect("sockets", rank, of, meeting, 30.0) if of > 1 else ALONE
    before = _most_memory()
    engine = load(folder, group, LOADING)
    group.barrier()
    engine.forward([Segment(0, 0, np.arange(64), np.arange(64))])
    answer.send(_most_memory() - before)


def growth(folder: Path, of: int) -> list[int]:
    """Bytes that each rank's memory grew by at most, while it loaded and ran a pass."""
    spawn, meeting = multiprocessing.get_context("spawn"), meeting_point()
    pipes = [spawn.Pipe() for _ in range(of)]
    processes = [
        spawn.Process(target=grown, args=(folder, rank, of, meeting, pipes[rank][1]), daemon=True) for rank in range(of)
    ]
    for process in processes:
        process.start()
    try:
        return [end.recv() for end, _ in pipes]
    finally:
        for process in processes:
            process.join(10)


def _most_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def meet(of: int, meeting: str, ranks: Sequence[int] | None = None, **settings: Any) -> list[Future[SocketGroup]]:
    """Ranks of a group, each in a thread that meets the others."""
    pool = ThreadPoolExecutor(of)
    settings = {"timeout_s": 5.0, "rendezvous_s": 5.0, **settings}
    wanted = range(of) if ranks is None else ranks
    found = [pool.submit(SocketGroup, rank, of, meeting, **settings) for rank in wanted]
    pool.shutdown(wait=False)
    return found


@contextmanager
def leading(folder: Path, of: int, **loading: Any) -> Iterator[Engine]:
    """A model shared by ranks that are threads of this process."""
    settings: Any = {"dtype": "float32", "slots": 4, "threads": 1, **loading}
    groups = [it.result() for it in meet(of, meeting_point())]

    def follow_in_thread(group: SocketGroup) -> None:
        follow(CpuEngine.load(folder, EngineSettings(group=group, **settings)), group)

    others = [threading.Thread(target=follow_in_thread, args=(group,)) for group in groups[1:]]
    for other in others:
        other.start()
    leader = lead(CpuEngine.load(folder, EngineSettings(group=groups[0], **settings)), groups[0])
    try:
        yield leader
    finally:
        leader.close()
        for other in others:
            other.join(10)
        for group in groups:
            group.close()
        assert not any(other.is_alive() for other in others)
