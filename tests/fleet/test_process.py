"""The start of one server: how long it may take, what of its output is forwarded, and that it ends with its starter."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from outrider.config import DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.process import START_S, Process, start_limit
from tests.fleet.conftest import DRAFTER, TARGET

STARTER = """
import asyncio, sys
from pathlib import Path
from outrider.config import DrafterConfig
from outrider.fleet.process import Process

async def main():
    process = Process("drafter", "drafter", DrafterConfig(model=Path(sys.argv[1])), print)
    await process.start(sys.argv[2])
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


def test_a_checkpoint_from_the_hub_gets_a_longer_start_limit_than_a_local_one() -> None:
    for there in (VerifierConfig(model=TARGET), DrafterConfig(model=DRAFTER), RouterConfig(models={"m": TARGET})):
        assert start_limit(there) == START_S
    named = Path("org/name")
    for fetched in (VerifierConfig(model=named), DrafterConfig(model=named), RouterConfig(models={"m": named})):
        assert start_limit(fetched) > 3600


async def test_fetch_progress_is_forwarded_at_once_and_other_lines_when_the_server_is_ready() -> None:
    forwarded: list[str] = []
    process = Process("verifier", "v", VerifierConfig(model=TARGET), lambda _, line: forwarded.append(line))
    output = asyncio.StreamReader()
    reading = asyncio.create_task(process.read_output(output))
    lines = ["loading", "12:00 INFO outrider.hub: fetching org/name", "measuring"]
    output.feed_data("".join(f"{line}\n" for line in lines).encode())
    await asyncio.sleep(0.01)
    assert forwarded == lines[1:2]
    output.feed_data(b"outrider verifier: listening on h:1\nserving\n")
    output.feed_eof()
    await reading
    assert forwarded == [lines[1], lines[0], lines[2], "serving"]


async def test_an_overlong_line_is_skipped_and_later_lines_are_read() -> None:
    """If the reading ended there, the server would wait for ever when it writes its log."""
    forwarded: list[str] = []
    process = Process("verifier", "v", VerifierConfig(model=TARGET), lambda _, line: forwarded.append(line))
    output = asyncio.StreamReader(limit=64)
    reading = asyncio.create_task(process.read_output(output))
    output.feed_data(b"outrider verifier: listening on h:1\n")
    for _ in range(5):
        output.feed_data(b"x" * 100)
        await asyncio.sleep(0)
    output.feed_data(b"\nafterwards\n")
    output.feed_eof()
    await reading
    assert forwarded[-1] == "afterwards"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
async def test_a_server_leads_its_process_session_and_ends_with_a_starter_that_is_killed(redis_url: str) -> None:
    command = (sys.executable, "-c", STARTER, str(DRAFTER), redis_url)
    starter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert starter.stdout is not None
    pid = int(await starter.stdout.readline())
    assert os.getsid(pid) == pid
    ended, server, loop = asyncio.Event(), os.pidfd_open(pid), asyncio.get_running_loop()
    loop.add_reader(server, ended.set)
    try:
        starter.kill()
        await asyncio.wait_for(ended.wait(), 10)
        await starter.wait()
    finally:
        loop.remove_reader(server)
        os.close(server)
