"""A client that TypeScript's own tools generate from the protos streams the text that the SDK returns."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import outrider
from tests.examples.conftest import EXAMPLES, ROOT, Reached

pytestmark = [
    pytest.mark.long,  # it fetches packages
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]


def run(folder: Path, *command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in a folder of its own, beside the protos."""
    root = tmp_path_factory.mktemp("typescript")
    shutil.copytree(ROOT / "protos", root / "protos")
    folder = root / "examples" / "typescript"
    left = shutil.ignore_patterns("node_modules", "generated", "dist")
    shutil.copytree(EXAMPLES / "typescript", folder, ignore=left)
    run(folder, "npm", "install", "--no-audit", "--no-fund")
    run(folder, "npm", "run", "build")
    return folder


async def test_the_typescript_example_streams_the_answer(built: Path, reached: Reached) -> None:
    output = await asyncio.to_thread(run, built, "npm", "start", "--silent", environment=reached.environment)
    key = reached.environment["OUTRIDER_API_KEY"]
    async with outrider.AsyncClient(reached.router, api_key=key, ca=reached.ca) as client:
        expected = await client.generate("def add(a, b):\n", max_tokens=48, temperature=0.6, seed=7)
    text, _, figures = output.rstrip("\n").rpartition("\n")
    assert text == expected.text
    assert figures.startswith(f"FINISH_REASON_{expected.finish_reason.upper()}: {expected.usage.completion_tokens} tok")
