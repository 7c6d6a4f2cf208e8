"""Processor time of each committed token, by process and stage: `python -m bench.cpu`.

A cluster whose engines cost nothing serves 1, 8, 32 and 128 sessions, without speculation and with trees of eight
nodes. So what is measured is all that the servers, the client and Redis do around the passes.

With `--native` the passes are those of the compiled engine, over the target padded to a size; prompts are the held-out
ones, drafts are as the default policy has them, and the table shows what share of a token's time the passes are.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.cpu.client import Callers, ClientFigures
from bench.cpu.server import Script
from bench.rows.processes import ROOT
from outrider.cli.command import parse_count
from outrider.cli.performance.samples import percentile
from outrider.config import (
    ClusterConfig,
    DrafterConfig,
    GatewayConfig,
    RedisConfig,
    RouterConfig,
    Section,
    VerifierConfig,
)
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process, Role
from outrider.store.redis.embedded import EmbeddedRedis

TARGET, DRAFTER = ROOT / "models" / "target", ROOT / "models" / "drafter"
DEPTH, WIDTH, NODES = 4, 2, 8
ACCEPTANCE = 0.7
WRITTEN_S = 5.0  # timeout for a process to write its figures
MAX_NODES = 256  # of one pass, which a verifier does not exceed
PROMPT_CHARACTERS = 200  # of held-out prompts, so that little time goes into reading them
SPARE_SLOTS = 8  # for sessions whose successors have begun
PERIODS = 10  # of a soak


class ScriptedProcess(Process):
    """A server of the cluster whose engine is scripted, if it has one."""

    script: Script

    async def _run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.cpu.server", self.script.to_json(), self.name, *arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )


class ScriptedCluster(LocalCluster):
    """A cluster of `ScriptedProcess`."""

    def __init__(self, config: ClusterConfig, script: Script) -> None:
        self._script = script
        super().__init__(config)

    def _server(self, role: Role, name: str, section: Section) -> Process:
        process = ScriptedProcess(role, name, section, self._forward)
        process.script = self._script
        return process


@dataclass(frozen=True, slots=True)
class Measured:
    """One number of sessions, with or without speculation."""

    sessions: int
    drafted: bool
    tokens_per_s: float
    tokens_per_chunk: float
    us: dict[str, float]  # of a processor for each committed token, by process
    stages: dict[str, dict[str, float]]  # those times by process and stage
    between_ms: tuple[float, float]  # from one pass to the next: median and 99th percentile
    gap_ms: tuple[float, float]  # from one chunk of a session to its next: median and 99th percentile
    resident_mb: dict[str, float]  # memory at the end, by process


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured."""

    sessions: tuple[int, ...]
    seconds: float
    drafted: tuple[bool, ...]
    pass_ms: float
    native: Path | None = None  # checkpoint of a target whose own passes run; None: scripted ones
    gateway: bool = False  # the callers call a gateway over HTTP


async def measure(options: Options, report: Callable[[str], None]) -> list[Measured]:
    """Measure each number of sessions, without and with speculation."""
    found = []
    for drafted in options.drafted:
        for sessions in options.sessions:
            report(f"{sessions} sessions, {'trees' if drafted else 'plain'}")
            async with _cluster(options, sessions, drafted) as cluster:
                found.append(await _measure(cluster, options, sessions, drafted))
    return found


async def soak(options: Options, report: Callable[[str], None]) -> list[Measured]:
    """Measure the most sessions with speculation in one cluster for all of the seconds, a period at a time."""
    sessions, period = max(options.sessions), replace(options, seconds=options.seconds / PERIODS)
    found = []
    async with _cluster(options, sessions, drafted=True) as cluster:
        for number in range(1, PERIODS + 1):
            report(f"{sessions} sessions, trees: period {number} of {PERIODS}")
            found.append(await _measure(cluster, period, sessions, drafted=True))
    return found


@dataclass(frozen=True, slots=True)
class _Running:
    cluster: ScriptedCluster
    redis: EmbeddedRedis
    folder: Path


@asynccontextmanager
async def _cluster(options: Options, sessions: int, drafted: bool) -> AsyncIterator[_Running]:
    slots, native = sessions + SPARE_SLOTS, options.native
    target = native or TARGET
    rows = MAX_NODES if native else min(MAX_NODES, NODES * slots)
    threads = (os.cpu_count() or 1) if native else 1
    with TemporaryDirectory() as folder, EmbeddedRedis() as redis:
        router = RouterConfig(
            listen="127.0.0.1:0",
            models={"target": target},
            max_sessions=slots,
        )
        if not native:
            router = router.model_copy(update={"depth": DEPTH, "width": WIDTH, "nodes": NODES})
        config = ClusterConfig(
            redis=RedisConfig(url=redis.url),
            router=router,
            verifier=[VerifierConfig(model=target, slots=slots, max_nodes=rows, threads=threads)],
            drafter=[DrafterConfig(model=DRAFTER, slots=slots, threads=1)] if drafted else [],
            gateway=GatewayConfig(listen="127.0.0.1:0") if options.gateway else None,
        )
        script = Script(ACCEPTANCE, options.pass_ms / 1e3, folder, native is not None)
        async with ScriptedCluster(config, script) as cluster:
            yield _Running(cluster, redis, Path(folder))


async def _measure(running: _Running, options: Options, sessions: int, drafted: bool) -> Measured:
    callers = Callers(
        running.cluster.router_address,
        sessions,
        options.seconds,
        ("goodput" if options.native else "rounds") if drafted else "off",
        str(running.folder / "client.json"),
        _held_out() if options.native else (),
        running.cluster.processes["gateway"].address if options.gateway else "",
    )
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.cpu.client", callers.to_json()),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
        start_new_session=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        pids = {process.name: process.pid for process in running.cluster.processes.values()}
        pids |= {"client": client.pid, "redis": running.redis.pid}
        if not await client.stdout.readline():
            raise RuntimeError(f"the callers' process ended with {await client.wait()}")
        before = await _times(running, pids)
        printed = await client.stdout.readline()
        after = await _times(running, pids)
        resident = {name: _resident_mb(pid) for name, pid in pids.items()}
        figures = ClientFigures(**json.loads(printed))
    finally:
        client.stdin.close()
        await client.wait()
    tokens = figures.tokens
    between = after["verifier-0"].between

    def us(name: str, stage: str) -> float:
        return 1e6 * (after[name].stages[stage] - before[name].stages.get(stage, 0.0)) / tokens

    return Measured(
        sessions,
        drafted,
        tokens / figures.seconds,
        tokens / max(1, figures.chunks),
        {name: 1e6 * (after[name].cpu_s - before[name].cpu_s) / tokens for name in pids},
        {name: {stage: us(name, stage) for stage in after[name].stages} for name in pids},
        (1e3 * percentile(between, 50), 1e3 * percentile(between, 99)),
        (percentile(figures.gaps_ms, 50), percentile(figures.gaps_ms, 99)),
        resident,
    )


def _held_out() -> tuple[str, ...]:
    lines = (ROOT / "examples" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["prompt"][:PROMPT_CHARACTERS] for line in lines)


@dataclass(frozen=True, slots=True)
class _Times:
    """What a process has used so far."""

    cpu_s: float
    stages: dict[str, float]  # seconds
    between: list[float]  # seconds from one pass to the next, since the figures were written before


async def _times(running: _Running, pids: Mapping[str, int]) -> dict[str, _Times]:
    cpu = {name: _cpu_s(pid) for name, pid in pids.items()}
    sampled = {name: pid for name, pid in pids.items() if name != "redis"}
    files = {name: running.folder / f"{name}.json" for name in sampled}
    for name, pid in sampled.items():
        files[name].unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
    async with asyncio.timeout(WRITTEN_S):
        while not all(file.exists() for file in files.values()):
            await asyncio.sleep(0.01)
    found = {"redis": _Times(cpu["redis"], {}, [])}
    for name, file in files.items():
        written = json.loads(file.read_text(encoding="utf-8"))
        found[name] = _Times(cpu[name], written["seconds"], written["between"])
    return found


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak_table(found: Sequence[Measured]) -> str:
    """Return what may grow during a soak, a line for each period."""
    names = list(found[0].resident_mb)
    lines = ["tokens/s  gap of chunks, p50 and p99 ms  " + "".join(f"{name + ' MB':>15}" for name in names)]
    for one in found:
        gaps = f"{one.gap_ms[0]:>16.1f}{one.gap_ms[1]:>11.1f}  "
        lines.append(f"{one.tokens_per_s:>8.0f}{gaps}" + "".join(f"{one.resident_mb[name]:>15.0f}" for name in names))
    return "\n".join(lines)


def table(found: Sequence[Measured]) -> str:
    """Return the figures as text."""
    names = list(dict.fromkeys(name for measured in found for name in measured.us))
    lines = [f"{'us a token':<22}" + "".join(f"{_column(measured):>14}" for measured in found)]
    for name in names:
        lines.append(f"{name:<22}" + "".join(f"{measured.us.get(name, 0.0):>14.1f}" for measured in found))
        stages = dict.fromkeys(stage for measured in found for stage in measured.stages.get(name, {}))
        for stage in stages:
            values = [measured.stages.get(name, {}).get(stage, 0.0) for measured in found]
            lines.append(f"  {stage:<20}" + "".join(f"{value:>14.1f}" for value in values))
    lines.append(f"{'tokens/s':<22}" + "".join(f"{measured.tokens_per_s:>14.0f}" for measured in found))
    lines.append(f"{'tokens a chunk':<22}" + "".join(f"{measured.tokens_per_chunk:>14.2f}" for measured in found))
    for label, place in (("between passes, p50 ms", 0), ("between passes, p99 ms", 1)):
        lines.append(f"{label:<22}" + "".join(f"{measured.between_ms[place]:>14.2f}" for measured in found))
    for label, place in (("gap of chunks, p50 ms", 0), ("gap of chunks, p99 ms", 1)):
        lines.append(f"{label:<22}" + "".join(f"{measured.gap_ms[place]:>14.2f}" for measured in found))
    return "\n".join(lines)


def last_line(found: Sequence[Measured]) -> str:
    """Return the figures of the most sessions, with trees where they were measured."""
    last = max(found, key=lambda measured: (measured.drafted, measured.sessions))
    drafter = last.us.get("drafter-0", 0.0)
    return (
        f"cpu: router_us={last.us['router']:.0f} verifier_us={last.us['verifier-0']:.0f} drafter_us={drafter:.0f} "
        f"client_us={last.us['client']:.0f} router_tokens_s_core={1e6 / last.us['router']:.0f} "
        f"overhead_ms={last.between_ms[0]:.2f}"
    )


def _column(measured: Measured) -> str:
    return f"{measured.sessions} {'trees' if measured.drafted else 'plain'}"


def main() -> None:
    parser = ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32, 128], help="[default: 1 8 32 128]")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement [default: 8]")
    parser.add_argument("--only", choices=("plain", "trees"), help="one of the two [default: both]")
    parser.add_argument("--pass-ms", type=float, default=0.0, help="that a pass of the target sleeps [default: 0]")
    parser.add_argument("--native", metavar="PARAMETERS", help="real passes of the target, padded to so many, as 150M")
    parser.add_argument("--gateway", action="store_true", help="callers by HTTP, without speculation")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="the most sessions, with trees, in ten periods")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    only = "plain" if arguments.gateway else arguments.only
    drafted = {None: (False, True), "plain": (False,), "trees": (True,)}[only]
    options = Options(
        tuple(arguments.sessions), arguments.seconds, drafted, arguments.pass_ms, gateway=arguments.gateway
    )
    with TemporaryDirectory(prefix="outrider-bench-") as scratch:
        if arguments.native:
            options = replace(options, native=Path(scratch) / "target")
            pad_checkpoint(TARGET, Path(scratch) / "target", parameters=parse_count(arguments.native))
        run = measure
        if arguments.soak:
            options, run = replace(options, seconds=60 * arguments.soak), soak
        found = asyncio.run(run(options, lambda what: print(what, file=sys.stderr, flush=True)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(measured) for measured in found], indent=1), encoding="utf-8")
    print(soak_table(found) if arguments.soak else table(found))
    print(last_line(found))


if __name__ == "__main__":
    main()
