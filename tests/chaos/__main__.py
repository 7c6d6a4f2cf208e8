"""Strikes a cluster under load, prints what came of it, and says whether all was as it must be."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from outrider.errors import ConfigError
from tests.chaos import blows as making
from tests.chaos.blows import Blow
from tests.chaos.load import Load, Tally, cases
from tests.chaos.report import last_line, table
from tests.chaos.servers import Forward, Servers, Shape
from tests.chaos.striking import Say, Striker, Struck

SESSIONS = 32
LEAVING = 0.1  # the share of answers that their client leaves or cancels
UP_TO_SPEED = 1000  # tokens that all say before the first blow


class Part(NamedTuple):
    """A cluster's share of a run."""

    scenarios: tuple[tuple[str, int], ...]  # names and rounds
    minutes: float
    proxied: bool = False


WHOLE = (
    Part((("freeze", 1), ("restart", 1), ("flap", 3)), 3.0),
    Part((("kill", 50),), 19.5),
    Part((("black-hole", 1),), 2.5, proxied=True),
)
QUICK = (Part((("kill", 3), ("freeze-router", 1)), 1.6),)


def main() -> None:
    """The command line. Exit status: 0; 1 if a token was lost, repeated or changed; 2 for a flag that is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="everything, for half an hour")
    parser.add_argument("--quick", action="store_true", help="a little of it, in three minutes")
    parser.add_argument("--scenario", default="kill", help="one of " + ", ".join(making.SCENARIOS))
    parser.add_argument("--seed", type=int, default=7, help="the same seed strikes the same blows in the same order")
    parser.add_argument("--count", type=int, default=2, help="rounds of the scenario's blows")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="at once")
    parser.add_argument("--minutes", type=float, default=28.0, help="no blow falls later")
    parser.add_argument("--write", type=Path, help="write the blows to a file, and strike none")
    parser.add_argument("--blows", type=Path, help="strike those of such a file")
    parser.add_argument("--log", type=Path, help="what the servers say")
    options = parser.parse_args()
    try:
        sys.exit(asyncio.run(run(options)))
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        sys.exit(2)


async def run(options: argparse.Namespace) -> int:
    """All parts; the exit status."""
    began = time.monotonic()
    with ExitStack() as stack:
        log = stack.enter_context(options.log.open("w", encoding="utf-8")) if options.log else None

        def say(line: str) -> None:
            print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

        def forward(name: str, line: str) -> None:
            if log is not None:
                print(f"{time.monotonic() - began:8.3f} {name} {line}", file=log, flush=True)

        proxied = options.scenario == "black-hole"
        chosen = (Part(((options.scenario, options.count),), options.minutes, proxied),)
        parts = WHOLE if options.whole else QUICK if options.quick else chosen
        done: list[Struck] = []
        tally = Tally()
        for part in parts:
            blows = [blow for name, count in part.scenarios for blow in making.scenario(name, options.seed, count)]
            if options.blows:
                blows = making.read(options.blows)
            if options.write:
                making.write(blows, options.write)
                continue
            done += await strike(part, blows, options, tally, say, forward)
        if not options.write:
            print(table(done, tally))
            print(last_line(done, tally))
    return int(tally.wrong)


async def strike(
    part: Part, blows: Sequence[Blow], options: argparse.Namespace, tally: Tally, say: Say, forward: Forward
) -> list[Struck]:
    """One part, on a cluster of its own. What came of the answers goes into the tally."""
    async with Servers(Shape(proxied=part.proxied), forward) as servers:
        say("all servers are there")
        async with Load(servers, cases(options.sessions), options.seed, LEAVING, tally) as load:
            await load.undisturbed()
            say(f"the undisturbed answers: {load.said} tokens")
            load.begin()
            await load.more(UP_TO_SPEED, 10.0)
            striker = Striker(servers, load, say)
            await striker.run(blows, 60 * part.minutes)
            await load.end()
            say(f"{tally.answers} answers, as they must be: {not tally.wrong}")
            return striker.done


if __name__ == "__main__":
    main()
