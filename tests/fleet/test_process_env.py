"""What is settled before libraries load holds for all that a server starts."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import asyncio, subprocess
from outrider.fleet import process_env

process_env.set_variables(1)
from outrider.rpc.server import Health, plaintext_health

async def main():
    async with plaintext_health("127.0.0.1:0", Health()):
        subprocess.run(["true"], preexec_fn=lambda: None, check=True)  # with work between fork and exec, as Ray does

asyncio.run(main())
"""


def test_a_fork_beside_a_grpc_server_is_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
