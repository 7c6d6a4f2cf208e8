"""Injects faults into a cluster under load, prints the results, and reports whether each is as it must be."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from outrider.errors import ConfigError
from tests.chaos import faults as plans
from tests.chaos.faults import ServerFault
from tests.chaos.hostile import HostileTenant, last_line_of_attacks
from tests.chaos.hostile_callers import HostileCallers
from tests.chaos.hostile_callers import table as findings_table
from tests.chaos.injector import FaultInjector, FaultOutcome, Report
from tests.chaos.load import Load, Tally, cases
from tests.chaos.report import last_line, missed, status, table
from tests.chaos.servers import Forward, Servers, Shape
from tests.hostile.attacks import ATTACKS

SESSIONS = 32
LEAVING = 0.1  # the share of answers that their client leaves or cancels
UP_TO_SPEED = 1000  # tokens that all sessions together receive before the first fault


class Part(NamedTuple):
    """A cluster's share of a run."""

    scenarios: tuple[tuple[str, int], ...]  # names and rounds
    minutes: float

    def faults(self, seed: int) -> list[ServerFault]:
        """The faults of its scenarios, in order."""
        return [fault for name, count in self.scenarios for fault in plans.scenario(name, seed, count)]


WHOLE = (
    Part((("freeze", 1), ("restart", 1), ("flap", 3)), 3.0),
    Part((("kill", 50),), 19.5),
    Part((("black-hole", 1),), 2.5),
)
HOSTILE_CALLERS, HOSTILE = "hostile-callers", "hostile"  # the scenarios in which callers are the fault
QUICK = (Part((("kill", 3), ("freeze-router", 1)), 1.6),)


def main() -> None:
    """The command line. Exit status: 0; 1 if a token was lost, repeated or changed, if an error reached a caller, or if
    a bound was not kept; 2 for a flag that is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="everything, for 90 minutes")
    parser.add_argument("--quick", action="store_true", help="a little of it, in three minutes")
    parser.add_argument(
        "--scenario", default="kill", help="one of " + ", ".join([*plans.SCENARIOS, HOSTILE_CALLERS, HOSTILE])
    )
    parser.add_argument("--seed", type=int, default=7, help="the same seed injects the same faults in the same order")
    parser.add_argument("--count", type=int, default=2, help="rounds of the scenario's faults")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="at once")
    parser.add_argument(
        "--standby",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a second verifier keeps each session's KV",
    )
    parser.add_argument("--minutes", type=float, default=28.0, help="no fault begins later")
    parser.add_argument(
        "--callers-s", type=float, default=120.0, help="others are measured beside hostile callers so long"
    )
    parser.add_argument("--attack-s", type=float, default=60.0, help="of each attack of `hostile`, and as long without")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="of `hostile`; again for several")
    parser.add_argument("--write", type=Path, help="write the faults to a file, and inject none")
    parser.add_argument("--faults", type=Path, help="inject those of such a file, in --minutes")
    parser.add_argument("--log", type=Path, help="what the servers say")
    options = parser.parse_args()
    try:
        sys.exit(asyncio.run(run(options)))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        sys.exit(2)


async def run(options: argparse.Namespace) -> int:
    """Runs all parts. Return the exit status."""
    began = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # or the servers would stay
    with ExitStack() as stack:
        log = stack.enter_context(options.log.open("w", encoding="utf-8")) if options.log else None

        def report(line: str) -> None:
            print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

        def forward(name: str, line: str) -> None:
            if log is not None:
                print(f"{time.monotonic() - began:8.3f} {name} {line}", file=log, flush=True)

        if not (options.whole or options.quick or options.faults):
            if options.scenario == HOSTILE_CALLERS:
                return await press(options, report, forward)
            if options.scenario == HOSTILE:
                return await attack(options, report, forward)
        parts = WHOLE if options.whole else QUICK if options.quick else None
        parts = parts or (Part(((options.scenario, options.count),), options.minutes),)
        work = [(part.faults(options.seed), part.minutes) for part in parts]
        if options.faults:
            work = [(plans.read(options.faults), options.minutes)]
        if options.write:
            plans.write([fault for faults, _ in work for fault in faults], options.write)
            return 0
        done: list[FaultOutcome] = []
        tally = Tally()
        try:
            for faults, minutes in work:
                await inject(faults, minutes, options, done, tally, report, forward)
        finally:  # what was measured counts, whatever became of the run
            print(table(done, tally))
            for line in missed(done):
                print(line)
            print(last_line(done, tally))
        others = 0
        if options.whole:
            others = max(await press(options, report, forward), await attack(options, report, forward))
    return status(done, tally) or others


async def press(options: argparse.Namespace, report: Report, forward: Forward) -> int:
    """Hostile callers, against clusters of their own; the exit status."""
    callers = HostileCallers(report, forward, options.callers_s)
    try:
        await callers.run()
    finally:
        print(findings_table(callers.findings))
    return int(not callers.findings or not all(finding.met for finding in callers.findings))


async def attack(options: argparse.Namespace, report: Report, forward: Forward) -> int:
    """A hostile tenant, against a cluster of its own; the exit status."""
    hostile = HostileTenant(report, forward, options.attack_s, options.attack)
    try:
        await hostile.run()
    finally:
        print(findings_table(hostile.findings))
        print(last_line_of_attacks(hostile.findings))
    return int(not hostile.findings or not all(finding.met for finding in hostile.findings))


async def inject(
    faults: Sequence[ServerFault],
    minutes: float,
    options: argparse.Namespace,
    done: list[FaultOutcome],
    tally: Tally,
    report: Report,
    forward: Forward,
) -> None:
    """Injects faults into a cluster of its own. Adds outcomes to `done`, and answers to the tally."""
    proxied = any(fault.kind == "black-hole" for fault in faults)
    async with Servers(Shape(proxied=proxied, standby=options.standby), forward) as servers:
        report("all servers are there")
        async with Load(servers, cases(options.sessions), options.seed, LEAVING, tally) as load:
            await load.undisturbed()
            report(f"the undisturbed answers: {load.received_tokens} tokens")
            load.begin()
            await load.more(UP_TO_SPEED, 10.0)
            await FaultInjector(servers, load, report, done).run(faults, 60 * minutes)
            await load.end()
            report(f"{tally.answers} answers, as they must be: {not tally.wrong}")


if __name__ == "__main__":
    main()
