"""Signals end a server process cleanly; mistakes of the user end it with a message."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.errors import CheckpointError, ConfigError, InternalError, Unavailable
from outrider.rpc.lifecycle import run_until_signal, user_error

SERVER = """
import asyncio, sys
from outrider.rpc.lifecycle import fast_event_loop, run_until_signal

async def main():
    try:
        print("up", type(asyncio.get_running_loop()).__module__, flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(float(sys.argv[1]))
        print("drained", flush=True)

run_until_signal(main(), fast_event_loop if sys.argv[2] == "uvloop" else None)
"""


def started(drain: float, loop: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(drain), loop], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"up {loop}")
    return process


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_server_and_its_clean_up_runs(number: signal.Signals, loop: str) -> None:
    with started(0.05, loop) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (out, err, process.returncode) == ("drained\n", "", 0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_second_signal_cuts_the_clean_up_short(loop: str) -> None:
    with started(30, loop) as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert (out, err, process.returncode) == ("", "", 0)


def test_a_server_and_its_children_write_no_core_dump() -> None:
    with started(0, "asyncio") as process:
        limits = Path(f"/proc/{process.pid}/limits").read_text(encoding="utf-8")
        process.send_signal(signal.SIGTERM)
    core = next(line.split() for line in limits.splitlines() if line.startswith("Max core file size"))
    # With one byte the kernel hands a dump to no program either; a hard limit of 0 cannot be raised to that.
    assert core[4:6] in (["1", "1"], ["0", "0"])
    script = """
import os, resource, signal
from outrider.rpc.core_dumps import forbid_core_dumps
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
forbid_core_dumps()
forbid_core_dumps()
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status) == signal.SIGSEGV, os.WCOREDUMP(status))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "True False\n"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("context: too long"),
        CheckpointError("no such folder"),
        ExceptionGroup("tasks", [ExceptionGroup("inner", [Unavailable("redis is away")])]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_mistake_of_the_user_is_a_message_and_status_2(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_until_signal(main())
    assert caught.value.code == 2
    expected = user_error(error)
    assert capfd.readouterr().err == f"outrider: {expected}\n"


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError(), InternalError("bug"), ExceptionGroup("", [ConfigError("x"), KeyError("y")])],
)
def test_a_bug_is_not_dressed_up_as_a_mistake_of_the_user(error: Exception) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_until_signal(main())
