"""Builds llama.cpp, where it is not there, and runs these tests with it: python -m tests.engine.llama_cpp."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from bench.peers.llama_cpp import FOLDER, build
from tests.engine.llama_cpp.converter import fetch_converter

PACKAGES = "llama_cpp", "diskcache"  # what this environment has not


def environment() -> dict[str, str]:
    """Return the environment in which llama.cpp can be imported: where none is installed, the benchmark's."""
    if find_spec("llama_cpp"):
        return {**os.environ}
    asyncio.run(build(lambda what: print(what, flush=True)))
    (installed,) = (FOLDER / "env" / "lib").glob("python*/site-packages")
    links = FOLDER / "packages"
    links.mkdir(exist_ok=True)
    for package in PACKAGES:
        if not (link := links / package).exists():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(installed / package, links))  # relative: the folder may be moved
    paths = [os.environ.get("PYTHONPATH", ""), str(links)]
    library = str(FOLDER / "library" / "bin")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "LLAMA_CPP_LIB_PATH": library}


if __name__ == "__main__":
    run_in = environment()
    fetch_converter()
    tests = [sys.executable, "-m", "pytest", str(Path(__file__).parent), *sys.argv[1:]]
    sys.exit(subprocess.run(tests, env=run_in, check=False).returncode)
