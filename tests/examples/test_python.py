"""Every example runs as it is against a cluster with certificates, keys and a gateway, all found in the environment."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, Reached

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
async def test_every_python_example_runs(example: str, reached: Reached) -> None:
    arguments = {
        "openai_client.py": [reached.gateway],
        "secured.py": [reached.router, reached.ca, reached.key_file],
    }.get(example, [])
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / example),
        *arguments,
        env={**os.environ, **reached.environment},
        cwd=Path("/"),  # nothing is found by accident
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, failed = await asyncio.wait_for(running.communicate(), 60)
    assert (running.returncode, failed.decode()) == (0, "")
    assert EXPECTED.get(example, "") in output.decode()


EXPECTED = {
    "generate.py": "plain: ",
    "logprobs.py": "of: ",
    "openai_client.py": " of them drafted",
    "resume.py": "ended by cancelled",
    "secured.py": "another key: ",
    "speculation.py": "the same text: True",
    "stream.py": "ended by length",
    "turns.py": "forked: ",
}
