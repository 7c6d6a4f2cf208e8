"""Ranks on torch listen where the other ranks reach them, and nowhere else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.tensor_parallel.process_group import GLOO, NCCL, TorchRanks, choose_interface, wait_for
from tests.engine.ranked import meeting_point, ranked
from tests.engine.small_checkpoints import make_checkpoint, prompt

LISTENING = "0A"
NOBODYS = "192.0.2.1"  # an address for documentation


def listens_at(pid: int) -> set[IPv4Address | IPv6Address]:
    """The addresses at which a process listens, by its sockets and the tables of the kernel."""
    opened = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
    inodes = {name.removeprefix("socket:[").rstrip("]") for name in opened if name.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and inode in inodes:
                words = bytes.fromhex(local.partition(":")[0])  # each of four bytes in the machine's order
                found.add(ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))))
    return found


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no interface, and what a test sets is undone."""
    for variable in (GLOO, NCCL):
        monkeypatch.setenv(variable, "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's sockets from /proc")
@pytest.mark.usefixtures("unset")
def test_ranks_listen_at_their_own_address_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "grouped", 96)
    here, before = {IPv4Address("127.0.0.1")}, listens_at(os.getpid())
    with socket.create_server(("", 0)):
        assert listens_at(os.getpid()) - before == {IPv4Address("0.0.0.0")} - before  # such a socket is found
    with ranked(2, folder, by="torch") as ranks, ranks.lead(folder) as leader:
        leader.forward([prompt(0, np.array([1, 2, 3]))])
        assert ranks.others[0].pid is not None
        assert listens_at(ranks.others[0].pid) == here
        assert listens_at(os.getpid()) - before <= here
        assert here <= listens_at(os.getpid())
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "=lo")


@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are found on Linux")
@pytest.mark.usefixtures("unset")
def test_an_interface_that_the_environment_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL, "ib0,ib1")
    choose_interface("127.0.0.1")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "ib0,ib1")
    monkeypatch.setenv(GLOO, "eth7")
    choose_interface(NOBODYS)
    assert (os.environ[GLOO], os.environ[NCCL]) == ("eth7", "ib0,ib1")


@pytest.mark.parametrize("named", [None, GLOO, NCCL])
@pytest.mark.usefixtures("unset")
def test_an_address_of_no_interface_is_refused(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    if named is not None:
        monkeypatch.setenv(named, "eth7")
    with pytest.raises(RankLost, match=f"have the address {NOBODYS}; set {GLOO} and {NCCL}"):
        choose_interface(NOBODYS)


def test_a_rendezvous_that_another_process_listens_at_is_no_group() -> None:
    meeting = meeting_point().partition("#")[0]
    port = int(meeting.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RankLost, match="in use"):
        TorchRanks(0, 2, meeting)


def test_a_device_is_waited_for_and_not_for_ever() -> None:
    answers = iter([False, False, True])
    wait_for(lambda: next(answers), 60.0)
    assert next(answers, None) is None
    with pytest.raises(TimeoutError, match=r"the device has not finished a pass for 0\.05 s"):
        wait_for(lambda: False, 0.05)


def test_ranks_agree_only_if_all_do_and_name_their_machines() -> None:
    code = (
        "import sys\n"
        "from outrider.engine.tensor_parallel.process_group import TorchRanks\n"
        "rank = int(sys.argv[1])\n"
        "ranks = TorchRanks(rank, 2, sys.argv[2])\n"
        "names = ranks.names('machine-\u00e9%d' % rank)\n"
        "print(ranks.agree(True), ranks.agree(rank == 0), names, ranks.names('x' * 300)[0])\n"
        "ranks.close()\n"
    )
    address = meeting_point()
    command = [sys.executable, "-c", code]
    ranks = [subprocess.Popen([*command, str(rank), address], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert printed == [f"True False ['machine-\u00e90', 'machine-\u00e91'] {'x' * 256}\n"] * 2
