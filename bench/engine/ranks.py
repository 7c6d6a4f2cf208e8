"""`python -m bench.engine.ranks`: measures a pass on 1, 2 and 4 ranks of this machine, the share of communication, and
the memory of each rank; then models a pass with other links (`bench.engine.scaling`).

The groups run at the same time and take turns, so that a busy moment affects all of them. A waiting rank sleeps.
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

from bench.engine.scaling import print_scaling
from outrider.cli.command import parse_count, reported
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import Unavailable
from outrider.fleet import process_env

CONTEXT = 256  # KV rows before a measured pass
ROWS = (2, 8, 25, 64)
TURN_S = 3600.0  # timeout of ranks that wait for their turn
WARM_UP_PASSES = 3  # before the measured pass


class RankLayout(NamedTuple):
    """How a model is distributed."""

    ranks: int
    threads: int  # of each rank


@dataclass
class RankCosts:
    """The costs of a layout."""

    seconds: dict[int, list[float]] = field(default_factory=dict)  # of passes, by their rows
    waiting: dict[int, list[float]] = field(default_factory=dict)  # part of them in communication, on rank 0
    peak_bytes: list[int] = field(default_factory=list)  # of each rank's process
    began_bytes: list[int] = field(default_factory=list)  # before the model was loaded


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "400M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each layout.")] = 12,
    models: Annotated[Path, typer.Option(help="Folder that holds target/.")] = Path("models"),
) -> None:
    """Measure tensor parallelism on this machine, and model it for others."""
    screen = Console()
    layouts = [RankLayout(1, 1), RankLayout(1, 2), RankLayout(2, 1), RankLayout(4, 1)]
    with reported(), tempfile.TemporaryDirectory() as scratch:
        from outrider.engine.checkpoints.padding import pad_checkpoint

        folder = Path(scratch) / "target"
        pad_checkpoint(models / "target", folder, parameters=parse_count(parameters))
        costs = measure(folder, dtype, layouts, rounds)
        screen.print(_table(costs, f"target padded to {parameters}, {dtype}, behind {CONTEXT} tokens"))
        print_scaling(screen)


def measure(folder: Path, dtype: str, layouts: Sequence[RankLayout], rounds: int) -> dict[RankLayout, RankCosts]:
    """Measure all layouts in turns. Raises Unavailable when a rank fails."""
    costs = {layout: RankCosts() for layout in layouts}
    with ExitStack() as stack:
        groups = {layout: stack.enter_context(_running(folder, dtype, layout, costs[layout])) for layout in layouts}
        for _ in track(range(rounds), "measuring ...", console=Console(stderr=True), transient=True):
            for layout, time_pass in groups.items():
                for rows in ROWS:
                    seconds, waiting = time_pass(rows)
                    costs[layout].seconds.setdefault(rows, []).append(seconds)
                    costs[layout].waiting.setdefault(rows, []).append(waiting)
    return costs


@contextmanager
def _running(
    folder: Path, dtype: str, layout: RankLayout, costs: RankCosts
) -> Iterator[Callable[[int], tuple[float, float]]]:
    """Run the ranks. Yield a function that times a pass over some rows. At the end, add their memory to `costs`."""
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    pipes = [spawn.Pipe() for _ in range(layout.ranks)]
    processes: list[BaseProcess] = [
        spawn.Process(target=_rank, args=(pipes[rank][1], folder, dtype, layout, rank, meeting), daemon=True)
        for rank in range(layout.ranks)
    ]
    for process in processes:
        process.start()
    ends = [mine for mine, _ in pipes]

    def time_pass(rows: int) -> tuple[float, float]:
        ends[0].send(rows)
        answer: tuple[float, float] = _received(ends[0])
        return answer

    try:
        yield time_pass
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
        raise Unavailable("a rank has ended; its output is above") from None


def _rank(end: Connection, folder: Path, dtype: Any, layout: RankLayout, rank: int, meeting: str) -> None:
    """Run one rank. Rank 0 receives numbers of rows and answers with the times of such passes, until it receives 0."""
    process_env.set_variables(layout.threads)
    from outrider.engine.cpu.engine import CpuEngine
    from outrider.engine.interface.batch import Segment
    from outrider.engine.tensor_parallel.group import ALONE, SingleRank
    from outrider.engine.tensor_parallel.leader import follow, lead
    from outrider.engine.tensor_parallel.socket_group import SocketGroup

    group: SocketGroup | SingleRank = ALONE
    if layout.ranks > 1:
        group = SocketGroup(rank, layout.ranks, meeting, timeout_s=TURN_S)
    began_bytes = _peak()
    part = CpuEngine.load(
        folder, EngineSettings(dtype=dtype, slots=1, rows=CONTEXT + 128, threads=layout.threads, group=group)
    )
    if rank:
        follow(part, group)
    else:
        engine = lead(part, group)
        while rows := end.recv():
            zeros = np.zeros(rows, np.int64)
            segment = Segment(0, CONTEXT, zeros, np.arange(CONTEXT, CONTEXT + rows))
            for _ in range(WARM_UP_PASSES):
                engine.forward([segment])
            waited, began = part.exchange_s, time.perf_counter()
            engine.forward([segment])
            end.send((time.perf_counter() - began, part.exchange_s - waited))
        engine.close()
    end.send((began_bytes, _peak()))


def _peak() -> int:
    """Return the peak memory of this process (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _table(costs: dict[RankLayout, RankCosts], title: str) -> Table:
    """Return the table of medians. The share of communication is that of rank 0."""
    memory = ("peak MB a rank", "of it the model's")
    table = Table("ranks x threads", *(f"{rows} rows" for rows in ROWS), *memory, title=title)
    for layout, cost in costs.items():
        cells = []
        for rows in ROWS:
            seconds, waiting = (statistics.median(taken[rows]) for taken in (cost.seconds, cost.waiting))
            cells.append(f"{1e3 * seconds:.1f} ms" + (f", {waiting / seconds:.0%} comm." if layout.ranks > 1 else ""))
        of_model = max(peak - began for peak, began in zip(cost.peak_bytes, cost.began_bytes, strict=True))
        table.add_row(
            f"{layout.ranks} x {layout.threads}", *cells, f"{max(cost.peak_bytes) / 1e6:.0f}", f"{of_model / 1e6:.0f}"
        )
    return table


if __name__ == "__main__":
    typer.run(main)
