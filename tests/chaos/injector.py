"""Injects faults under a load and measures how long each affected session took to continue."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.chaos.faults import FLAPS, ServerFault
from tests.chaos.load import Load, Received
from tests.chaos.servers import Server, Servers

UNDER_WAY_S = 0.3  # tokens that arrive so soon after a fault may have been sent before it
PATIENCE_S = 20.0  # for a session to go on
BETWEEN_S = 10.0  # at most between two faults, if hardly a token comes
LOOK_S = 0.02

Report = Callable[[str], None]


@dataclass
class FaultOutcome:
    """One fault and what it did."""

    fault: ServerFault
    server: str
    at: float  # monotonic
    sessions: list[Received]  # the sessions that depended on the server
    recoveries: list[float] = field(default_factory=list)  # s, from the fault to each one's next token
    read_again: list[float] = field(default_factory=list)  # s of these, from asking a verifier to its first token
    besides: list[float] = field(default_factory=list)  # s of each recovery that were not spent on that
    stranded: int = 0  # sessions that did not go on in time
    back_s: float = 0.0  # until a Redis that was killed answered again; its log takes a while to load
    busy: dict[str, float] = field(
        default_factory=dict
    )  # s of processor time until all went on, by role; "clients": us

    @property
    def worst(self) -> float:
        """The longest recovery, in seconds."""
        return max(self.recoveries, default=0.0)


class FaultInjector:
    """Injects faults into a cluster. Reports a line for each, and appends its outcome to `done`."""

    def __init__(self, servers: Servers, load: Load, report: Report, done: list[FaultOutcome] | None = None) -> None:
        self.done = [] if done is None else done
        self._servers = servers
        self._load = load
        self._report = report
        self._reviving: dict[str, asyncio.Task[None]] = {}  # by name of the server
        self._before: dict[int, tuple[str, float]] = {}  # pid -> role and processor time when the fault began

    async def run(self, faults: Sequence[ServerFault], within_s: float) -> None:
        """Strikes them one after the other, and none after `within_s`.

        A fault waits for all servers of its role; and, as far as the time allows it, for all others: a start takes
        seconds of processor time, which recovery would be measured with. In the end all are there.
        """
        until = time.monotonic() + within_s
        for number, fault in enumerate(faults, 1):
            began, left = time.monotonic(), len(faults) - number + 1
            if began > until:
                self._report(f"out of time: {left} of {len(faults)} faults were not injected")
                break
            await self._whole(fault, until - (until - began) * (left - 1) / left)
            await self._load.more(fault.after, BETWEEN_S)
            outcome = await self._inject(fault)
            self.done.append(outcome)
            self._report(
                f"{number}/{len(faults)} {fault} ({outcome.server}): {len(outcome.sessions)} sessions affected, worst "
                f"{outcome.worst:.2f} s, stranded {outcome.stranded}; {self._load.tally.answers} answers, "
                f"{len(self._load.tally.errors)} errors; "
                + (f"back after {outcome.back_s:.2f} s; " if outcome.back_s else "")
                + "processor "
                + " ".join(f"{role}={spent:.1f}" for role, spent in outcome.busy.items())
            )
        await asyncio.gather(*self._reviving.values())

    async def _whole(self, fault: ServerFault, until: float) -> None:
        """Waits for the servers of the fault's role, and until then for all."""
        mine = [server.name for server in self._servers.of(fault.role)]
        await asyncio.gather(*(task for name, task in self._reviving.items() if name in mine))
        others = [task for task in self._reviving.values() if not task.done()]
        if others and (left := until - time.monotonic()) > 0:
            await asyncio.wait(others, timeout=left)

    async def _inject(self, fault: ServerFault) -> FaultOutcome:
        server, sessions = await self._choose(fault)
        self._before = self._processor_times()
        outcome = FaultOutcome(fault, server.name, time.monotonic(), sessions)
        match fault.kind:
            case "kill":
                await self._kill(server, outcome)
            case "flap":
                for _ in range(FLAPS):
                    await self._kill(server, outcome)
            case "restart":
                await server.child.stop()
                self._revive(server)
            case "freeze":
                server.freeze()
                await asyncio.sleep(fault.lasts_s)
                server.thaw()
            case "black-hole":
                link = self._servers.links[server.name if fault.link == server.role else fault.link]
                link.freeze()
                await asyncio.sleep(fault.lasts_s)
                link.thaw()
        if fault.lasts_s and server.role == "redis":  # no session can go on without it
            outcome.at = time.monotonic()
        await self._recovered(outcome)
        self._measure(outcome)
        return outcome

    async def _kill(self, server: Server, outcome: FaultOutcome) -> None:
        """Kills it; a Redis is started again at once, and others once the sessions have gone on without them."""
        server.kill()
        outcome.at = time.monotonic()
        if server.role != "redis":
            await self._recovered(outcome)
            self._revive(server)
        else:
            self._revive(server)
            await self._reviving[server.name]
            outcome.back_s = time.monotonic() - outcome.at

    def _revive(self, server: Server) -> None:
        self._reviving[server.name] = asyncio.create_task(self._servers.revive(server))

    async def _choose(self, fault: ServerFault) -> tuple[Server, list[Received]]:
        """The server of the fault, and the sessions that depend on it."""
        running = {received.session_id: received for received in self._load.running}
        records = await self._servers.records(running)
        depending = {
            server.name: [running[name] for name, record in records.items() if server.serves(record)]
            for server in self._servers.of(fault.role)
        }
        name = (max if fault.which == "busiest" else min)(depending, key=lambda name: len(depending[name]))
        return self._servers.named(name), depending[name]

    async def _recovered(self, outcome: FaultOutcome) -> None:
        """Waits until all have gone on, or ended."""
        give_up = outcome.at + PATIENCE_S
        while time.monotonic() < give_up and not all(went_on(received, outcome.at) for received in outcome.sessions):
            await asyncio.sleep(LOOK_S)

    def _measure(self, outcome: FaultOutcome) -> None:
        under_way_s = 0.0 if outcome.fault.role == "drafter" else UNDER_WAY_S  # tokens do not come by way of drafters
        since = [reading for reading in self._servers.readings if reading.at > outcome.at and reading.tokens > 1]
        again = {reading.session_id: reading.seconds for reading in reversed(since)}
        for received in outcome.sessions:
            if (took := recovery(received, outcome.at, under_way_s)) is not None:
                outcome.recoveries.append(took)
                outcome.read_again += [again[received.session_id]] if received.session_id in again else []
                outcome.besides.append(max(0.0, took - again.get(received.session_id, 0.0)))
            elif received.ended is None:
                outcome.stranded += 1
        busy: dict[str, float] = defaultdict(float)
        for pid, (role, spent) in self._processor_times().items():
            if pid in self._before and spent:  # it is still there
                busy[role] += spent - self._before[pid][1]
        outcome.busy = dict(busy)

    def _processor_times(self) -> dict[int, tuple[str, float]]:
        """By pid, the role and the seconds that a process has taken of a processor."""
        alive = [server for server in self._servers.all if server.child.status is None]
        times = {server.child.pid: (str(server.role), processor_s(server.child.pid)) for server in alive}
        return {**times, os.getpid(): ("clients", time.process_time())}


def went_on(received: Received, at: float) -> bool:
    """Return whether a session has received tokens since, beyond what was under way; or has ended."""
    return received.ended is not None or bool(received.times and received.times[-1] > at + UNDER_WAY_S)


def recovery(received: Received, at: float, under_way_s: float = UNDER_WAY_S) -> float | None:
    """Seconds from a fault to the token after the longest silence that it began; None if no token came since."""
    since = [at, *(moment for moment in received.times if moment > at)]
    silences = [(end - begin, end - at) for begin, end in pairwise(since) if begin <= at + under_way_s]
    return max(silences)[1] if silences else None


def processor_s(pid: int) -> float:
    """Seconds that a process has taken of a processor; 0 when it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
