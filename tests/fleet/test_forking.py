"""A server that is forked is like one that is started, in a fraction of the time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.config import DrafterConfig
from outrider.fleet.children import Child, start_child
from outrider.fleet.process import Process
from outrider.rpc.lifecycle import PARENT, USER_ERROR_STATUS
from tests.fleet.conftest import DRAFTER, ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

SECTION = DrafterConfig(model=DRAFTER, dtype="float32", slots=2, context=128)
HERE = {**os.environ, PARENT: str(os.getpid())}
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


def drafter(*, forked: bool = True) -> Process:
    return Process("drafter", "drafter", SECTION, lambda name, line: None, forked=forked)


def children(of: int) -> dict[int, str]:
    """Command lines of a process's children."""
    found = {}
    for task in Path(f"/proc/{of}/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except FileNotFoundError:  # a thread that has ended meanwhile
            continue
        for pid in map(int, pids):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


def forkservers(of: int | None = None) -> list[int]:
    return [pid for pid, line in children(of or os.getpid()).items() if "outrider.fleet.forkserver" in line]


def mapped(pid: int) -> str:
    """The files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def cpu_s(pid: int) -> float:
    """Processor seconds of a process, since it began or was forked."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def facts(pid: int) -> dict[str, object]:
    """What the operating system reports of a process."""
    at = Path(f"/proc/{pid}")
    lines = (line.split(":") for line in (at / "status").read_text().splitlines())
    return {
        **{name: (at / name).read_text() for name in ("cmdline", "comm", "limits", "oom_score_adj")},
        **{name: os.readlink(at / name) for name in ("cwd", "exe", "fd/0", "fd/3")},  # 3: the first that is its own
        **{name: value for name, value in lines if name in ("PPid", "SigBlk", "SigIgn", "SigCgt", "Umask")},
        "leads its session": os.getsid(pid) == pid,
    }


def runs(pid: int) -> bool:
    """Return whether it has not ended. A zombie has ended."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def until_ended(*pids: int) -> None:
    async with asyncio.timeout(10):
        while any(map(runs, pids)):
            await asyncio.sleep(0.01)


async def finished(child: Child) -> tuple[int, bytes, bytes]:
    assert child.stdout is not None
    assert child.stderr is not None
    output, errors = await asyncio.gather(child.stdout.read(), child.stderr.read())
    return await child.wait(), output, errors


async def test_a_forked_server_is_like_a_started_one_for_a_fraction_of_the_processor_time(redis_url: str) -> None:
    seen, took = [], []
    for forked in (False, True, True):
        process = drafter(forked=forked)
        await process.start(redis_url)
        took.append(cpu_s(process.pid))
        seen.append(facts(process.pid))
        await process.stop()
        assert process.status == 0
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert max(took[1:]) < took[0] / 3


async def test_what_forks_has_one_thread_and_nothing_open() -> None:
    await finished(await start_child(["--help"], HERE, forked=True))
    (server,) = forkservers()
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    opened = [os.readlink(f"/proc/{server}/fd/{name}") for name in os.listdir(f"/proc/{server}/fd")]
    assert sorted(name.partition(":")[0] for name in opened) == ["/dev/null", "pipe", "pipe", "socket"]
    loaded = mapped(server)
    assert all(wanted in loaded for wanted in ("numpy", "grpc", "tokenizers"))
    assert "libtorch" not in loaded
    assert not any(device in loaded for device in ("libcuda.so", "/dev/nvidia"))


@pytest.mark.parametrize(
    ("arguments", "environment", "status"),
    [
        (["--help"], {}, 0),
        (["drafter", "--nonsense"], {}, USER_ERROR_STATUS),
        (["drafter", "--model", "nowhere/at-all"], {}, USER_ERROR_STATUS),
        (["router", "--model", f"target={DRAFTER}", "--depth", "99"], {}, USER_ERROR_STATUS),
        (["drafter", "--model", str(DRAFTER)], {PARENT: "1"}, 1),
    ],
)
async def test_both_print_the_same_for_the_same_mistake(
    arguments: list[str], environment: dict[str, str], status: int, redis_url: str
) -> None:
    here = {**HERE, "REDIS_URL": redis_url, **environment}
    ends = [await finished(await start_child(arguments, here, forked=forked)) for forked in (False, True)]
    assert ends[0] == ends[1]
    assert ends[0][0] == status


async def test_each_has_its_own_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path("here")
    (tmp_path / model).symlink_to(DRAFTER)
    monkeypatch.chdir(tmp_path)
    for port in ("1", "2"):
        here = {**HERE, "REDIS_URL": f"redis://127.0.0.1:{port}"}
        _, _, errors = await finished(await start_child(["drafter", "--model", str(model)], here, forked=True))
        assert f"127.0.0.1:{port}" in errors.decode()
    before = forkservers()
    _, output, _ = await finished(await start_child(["--help"], {**HERE, "COLUMNS": "60"}, forked=True))
    assert max(map(len, output.decode().splitlines())) == 60
    assert len(forkservers()) == 1
    assert forkservers() != before  # what it has loaded may go by any variable


async def test_servers_outlive_what_forked_them_which_is_replaced(redis_url: str) -> None:
    first, second = drafter(), drafter()
    await first.start(redis_url)
    (server,) = forkservers()
    os.kill(server, signal.SIGKILL)
    await until_ended(server)
    await second.start(redis_url)
    (another,) = forkservers()
    assert another != server
    assert first.status is None
    os.kill(first.pid, signal.SIGKILL)
    assert await asyncio.wait_for(first.wait(), 10) == -signal.SIGKILL
    await second.stop()
    assert second.status == 0


async def test_where_none_can_be_forked_servers_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'outrider.fleet.forkserver' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    status, output, _ = await finished(await start_child(["--help"], {**HERE, "PYTHONPATH": paths}, forked=True))
    assert (status, b"Usage" in output) == (0, True)
    assert "2 threads run after the imports" in caplog.text
    assert forkservers() == []


async def test_a_start_that_is_given_up_leaves_nothing() -> None:
    before = set(children(os.getpid())) - set(forkservers())
    starting = asyncio.create_task(start_child(["drafter", "--model", str(DRAFTER)], HERE, forked=True))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    async with asyncio.timeout(10):
        while set(children(os.getpid())) - set(forkservers()) - before:
            await asyncio.sleep(0.01)


@pytest.fixture
def starter(redis_url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STARTER, str(DRAFTER), redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_all_end_with_who_started_them(starter: subprocess.Popen[str]) -> None:
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    (forks,) = forkservers(starter.pid)
    assert set(children(starter.pid)) == {server, forks}
    starter.kill()
    await until_ended(server, forks)
