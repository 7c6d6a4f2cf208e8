"""Pins processes to processor cores: servers that stand for two machines do not compete for one core."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from outrider.config import ClusterConfig, Section
from outrider.errors import ConfigError
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process, Role


class CoreSplit(NamedTuple):
    """The cores of the verifier, and those of every other process."""

    verifier: frozenset[int]
    others: frozenset[int]
    drafters_beside: bool = False  # whether drafters have the verifier's


def split_cores() -> CoreSplit:
    """Return the first core that this process may use, and the others. Raises ConfigError where it cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot pin processes to cores; run it on Linux")
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise ConfigError(
            "needs two cores, one for the verifier alone, and this process may use one; "
            "run it on a machine, or in a container, with two"
        )
    return CoreSplit(frozenset({first}), frozenset(others))


def pin(pid: int, cores: frozenset[int]) -> None:
    """Let all threads of a process, and those that they start later, run on these cores alone."""
    while unpinned := [thread for thread in _threads(pid) if _cores_of(thread) not in (None, cores)]:
        for thread in unpinned:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


@contextmanager
def pinned(cores: frozenset[int]) -> Iterator[None]:
    """Pin this process within the block."""
    before = frozenset(os.sched_getaffinity(0))
    pin(os.getpid(), cores)
    try:
        yield
    finally:
        pin(os.getpid(), before)


class PinnedCluster(LocalCluster):
    """A local cluster whose verifiers have cores of their own. Servers are pinned as soon as their process exists,
    before they load a model or start a thread."""

    def __init__(self, config: ClusterConfig, split: CoreSplit, forward: Callable[[str, str], None]) -> None:
        self._split = split
        super().__init__(config, forward=forward)

    def _server(self, role: Role, name: str, section: Section) -> Process:
        split = self._split
        beside = role == "verifier" or (role == "drafter" and split.drafters_beside)
        cores = split.verifier if beside else split.others
        return _PinnedProcess(role, name, section, self._forward, cores)


class _PinnedProcess(Process):
    """A server on some cores."""

    def __init__(
        self, role: Role, name: str, section: Section, forward: Callable[[str, str], None], cores: frozenset[int]
    ) -> None:
        super().__init__(role, name, section, forward)
        self._cores = cores

    async def _run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        child = await super()._run(arguments, environment)
        pin(child.pid, self._cores)
        return child


def _threads(pid: int) -> list[int]:
    with suppress(FileNotFoundError):  # the process has ended
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _cores_of(thread: int) -> set[int] | None:
    """Return the cores of a thread; None if it has ended."""
    with suppress(ProcessLookupError):
        return os.sched_getaffinity(thread)
    return None
