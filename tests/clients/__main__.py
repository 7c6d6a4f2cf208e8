"""Runs the flows of all clients, or of those in the folders that are named: python -m tests.clients [FOLDER ...]

A folder of `flows` has clients that can share an environment, and its packages.txt (in Node: package.json) what is
installed there, pinned: others disagree on versions. Two clusters answer them, one of them with a drafter;
each flow asks both and compares what they say.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import outrider
from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.chat import make_target
from tests.e2e.conftest import MODELS
from tests.e2e.test_tools import TEMPLATE

FLOWS = Path(__file__).parent / "flows"
ENVIRONMENTS = FLOWS.parents[2] / ".clients"
FLOW_S = 240.0
INSTALLS = 3  # attempts


@asynccontextmanager
async def gateway(target: Path, *, drafted: bool) -> AsyncIterator[LocalCluster]:
    """Yield a cluster with a gateway. One that has a drafter drafts always, whether that pays or not."""
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, policy="rounds", depth=4),
        verifier=[VerifierConfig(model=target, dtype="float32")],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32")] if drafted else [],
        gateway=GatewayConfig(listen="127.0.0.1:0"),
    )
    async with LocalCluster(config) as cluster:
        yield cluster


def installed(flows: Path) -> list[str | Path]:
    """Return the command that runs a folder's flows, in an environment that is made where it is not there."""
    node = (flows / "package.json").exists()
    packages = flows / ("package-lock.json" if node else "packages.txt")
    folder = ENVIRONMENTS / flows.name
    made_of, python = folder / "made-of", folder / "bin" / "python"
    if not made_of.exists() or made_of.read_text() != packages.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        if node:
            shutil.copytree(flows, folder)
            subprocess.run(["npm", "ci", "--silent", "--prefix", folder], check=True)
        else:
            uv, pip = ([sys.executable, "-m", tool] for tool in ("uv", "pip"))
            asked = [*pip, "config", "get", "global.find-links"]  # uv does not read pip's configuration
            found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
            subprocess.run([*uv, "--quiet", "venv", "--python", sys.executable, folder], check=True)
            install = [*uv, "--quiet", "pip", "install", "--python", python, "--requirement", packages]
            subprocess.run([*install, *(["--find-links", found] if found else [])], check=True)
        made_of.write_text(packages.read_text())
    if not node:
        return [python, "-m", "pytest", "-q", "-c", FLOWS / "pytest.ini", flows]
    for file in flows.glob("*.mjs"):
        shutil.copy(file, folder)
    return ["node", "--test", *folder.glob("*_flows.mjs")]


async def run(flows: Path, addresses: dict[str, str]) -> bool:
    """Run the flows of a folder, and return whether they are right."""
    for left in reversed(range(INSTALLS)):
        try:
            command = await asyncio.to_thread(installed, flows)
            break
        except subprocess.CalledProcessError:  # of a registry that did not answer
            if not left:
                raise
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-client-") as folder:
        environment = {"PATH": os.environ["PATH"], "HOME": folder, **addresses}
        running = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment)
        try:
            status = await asyncio.wait_for(running.wait(), FLOW_S)
        except TimeoutError:
            running.kill()
            status = await running.wait()
    print(f"clients: {flows.name}: {'failed' if status else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


async def main(names: list[str]) -> None:
    known = sorted(it.parent.name for it in (*FLOWS.glob("*/packages.txt"), *FLOWS.glob("*/package.json")))
    if unknown := set(names) - set(known):
        raise SystemExit(f"clients: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="outrider-clients-") as folder:
        target = Path(folder) / "target"
        make_target(target, TEMPLATE)
        async with gateway(target, drafted=True) as drafted, gateway(target, drafted=False) as plain:
            addresses = {"DRAFTED": drafted.processes["gateway"].address, "PLAIN": plain.processes["gateway"].address}
            passed = [name for name in names or known if await run(FLOWS / name, addresses)]
    print(f"clients: run={len(names or known)} passed={len(passed)} sdk={outrider.__version__}")
    if len(passed) < len(names or known):
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
