"""`python -m bench.ranks`: what a pass costs on 1, 2 and 4 ranks of this machine, how much of it is communication, and
how much memory each rank takes; then what other links would make of it, by a model (`bench.scaling`).

The groups are alive at the same time and take turns, so that a busy moment hits all alike. A rank that waits sleeps.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.scaling import print_scaling
from outrider.cli.pad import parse_count
from outrider.cli.reporting import reported
from outrider.errors import Unavailable
from outrider.fleet import surroundings

CONTEXT = 256  # rows behind which a pass is measured
ROWS = (2, 8, 25, 64)
PATIENCE_S = 3600.0  # of ranks whose turn it is not
BESIDE = 3  # passes that do not count, first


class Way(NamedTuple):
    """How a model is spread."""

    ranks: int
    threads: int  # of each


@dataclass
class Costs:
    """What a way costs, by rows of a pass."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    waiting: dict[int, list[float]] = field(default_factory=dict)  # of these, in communication, on rank 0
    peak_bytes: list[int] = field(default_factory=list)  # by rank: of the whole process
    began_bytes: list[int] = field(default_factory=list)  # before the model was loaded


def main(
    parameters: Annotated[str, typer.Option(help="The target is padded to that many.")] = "400M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each way has.")] = 12,
    models: Annotated[Path, typer.Option(help="Folder that holds target/.")] = Path("models"),
) -> None:
    """Measure tensor parallelism on this machine, and model it on others."""
    screen = Console()
    ways = [Way(1, 1), Way(1, 2), Way(2, 1), Way(4, 1)]
    with reported(), tempfile.TemporaryDirectory() as scratch:
        from outrider.engine.padding import pad_checkpoint

        folder = Path(scratch) / "target"
        pad_checkpoint(models / "target", folder, parameters=parse_count(parameters))
        costs = measure(folder, dtype, ways, rounds)
        screen.print(_table(costs, f"target padded to {parameters}, {dtype}, behind {CONTEXT} tokens"))
        print_scaling(screen)


def measure(folder: Path, dtype: str, ways: Sequence[Way], rounds: int) -> dict[Way, Costs]:
    """Runs all ways in turns. Raises Unavailable when a rank fails."""
    costs = {way: Costs() for way in ways}
    with ExitStack() as stack:
        groups = {way: stack.enter_context(_running(folder, dtype, way, costs[way])) for way in ways}
        for _ in track(range(rounds), "measuring ...", console=Console(stderr=True), transient=True):
            for way, ask in groups.items():
                for rows in ROWS:
                    seconds, waiting = ask(rows)
                    costs[way].seconds.setdefault(rows, []).append(seconds)
                    costs[way].waiting.setdefault(rows, []).append(waiting)
    return costs


@contextmanager
def _running(folder: Path, dtype: str, way: Way, costs: Costs) -> Iterator[Callable[[int], tuple[float, float]]]:
    """The ranks; gives what measures a pass over that many rows. At the end notes what memory they took."""
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    pipes = [spawn.Pipe() for _ in range(way.ranks)]
    processes: list[BaseProcess] = [
        spawn.Process(target=_rank, args=(pipes[rank][1], folder, dtype, way, rank, meeting), daemon=True)
        for rank in range(way.ranks)
    ]
    for process in processes:
        process.start()
    ends = [mine for mine, _ in pipes]

    def ask(rows: int) -> tuple[float, float]:
        ends[0].send(rows)
        answer: tuple[float, float] = _received(ends[0])
        return answer

    try:
        yield ask
        ends[0].send(0)
        for end in ends:
            began, peak = _received(end)
            costs.began_bytes.append(began)
            costs.peak_bytes.append(peak)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _received(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        raise Unavailable("a rank has ended; what it said is above") from None


def _rank(end: Connection, folder: Path, dtype: Any, way: Way, rank: int, meeting: str) -> None:
    """One rank's life. Rank 0 measures what it is asked for until that is 0."""
    surroundings.settle(way.threads)
    from outrider.engine.batch import Segment
    from outrider.engine.cpu.engine import CpuEngine
    from outrider.engine.group import ALONE, Alone
    from outrider.engine.ranks import follow, lead
    from outrider.engine.socket_group import SocketGroup

    group: SocketGroup | Alone = ALONE
    if way.ranks > 1:
        group = SocketGroup(rank, way.ranks, meeting, timeout_s=PATIENCE_S)
    began_bytes = _peak()
    part = CpuEngine.load(folder, dtype=dtype, slots=1, rows=CONTEXT + 128, threads=way.threads, group=group)
    if rank:
        follow(part, group)
    else:
        engine = lead(part, group)
        while rows := end.recv():
            zeros = np.zeros(rows, np.int64)
            segment = Segment(0, CONTEXT, zeros, np.arange(CONTEXT, CONTEXT + rows))
            for _ in range(BESIDE):
                engine.forward([segment])
            waited, began = part.exchange_s, time.perf_counter()
            engine.forward([segment])
            end.send((time.perf_counter() - began, part.exchange_s - waited))
        engine.close()
    end.send((began_bytes, _peak()))


def _peak() -> int:
    """The most memory that this process has had (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _table(costs: dict[Way, Costs], title: str) -> Table:
    """Medians; the share that is communication is rank 0's."""
    memory = ("peak MB a rank", "of it the model's")
    table = Table("ranks x threads", *(f"{rows} rows" for rows in ROWS), *memory, title=title)
    for way, cost in costs.items():
        cells = []
        for rows in ROWS:
            seconds, waiting = (statistics.median(taken[rows]) for taken in (cost.seconds, cost.waiting))
            cells.append(f"{1e3 * seconds:.1f} ms" + (f", {waiting / seconds:.0%} comm." if way.ranks > 1 else ""))
        own = max(peak - began for peak, began in zip(cost.peak_bytes, cost.began_bytes, strict=True))
        table.add_row(f"{way.ranks} x {way.threads}", *cells, f"{max(cost.peak_bytes) / 1e6:.0f}", f"{own / 1e6:.0f}")
    return table


if __name__ == "__main__":
    typer.run(main)
