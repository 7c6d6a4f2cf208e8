"""llama.cpp as a peer: built once from the source in llama-cpp-python's sdist, and its rows.

The build is in `build/llama.cpp/`: a separate environment with llama-cpp-python's bindings, and the library,
compiled for this machine's processor. Only the library is built: no server, tools, tests or examples.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.rows.processes import ROOT, output
from bench.rows.requests import BenchRequest, sample_from_json
from bench.rows.row import Models, WorkerRow, worker
from outrider.cli.performance.samples import Sample
from outrider.errors import ConfigError, Unavailable
from outrider.fleet.process_env import SPINS

VERSION = "0.3.36"  # of llama-cpp-python
PACKAGE = "llama-cpp-python"
FOLDER = ROOT / "build" / "llama.cpp"
BUILD_REQUIREMENTS = ("cmake>=3.21", "ninja", "scikit-build-core[pyproject]>=0.9.2")
BINDINGS_ONLY = "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"  # pip installs the bindings, cmake builds the library
OPTIONS_OFF = (
    *("LLAMA_BUILD_COMMON", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER"),
    *("LLAMA_BUILD_APP", "LLAMA_OPENSSL", "GGML_BUILD_TESTS", "GGML_BUILD_EXAMPLES"),
)
CONTEXT = 4096  # tokens, at most
CHAINS = {"llama.cpp": 0, "llama.cpp-draft-3": 3, "llama.cpp-draft-6": 6}  # drafted tokens before a pass, by row
LOOKUP = 2  # tokens that prompt lookup drafts: what llama-cpp-python advises on CPUs
WORKER = Path(__file__).with_name("llama_worker.py")
ADVICE = "or leave llama.cpp's rows out with --no-llama-cpp"

Progress = Callable[[str], None]  # receives the current activity


async def build(progress: Progress, folder: Path = FOLDER) -> None:
    """Build llama.cpp in `folder`, unless this version is there already. It takes some minutes and needs a network.

    Raises ConfigError with the failed step and what to do.
    """
    stamp = folder / "version"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == VERSION:
        return
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(f"llama.cpp: there is no C++ compiler to build it with; install one (g++), {ADVICE}")
    shutil.rmtree(folder, ignore_errors=True)
    scripts = folder / "env" / "bin"
    pip = (str(scripts / "pip"), "--disable-pip-version-check", "--quiet")
    progress("llama.cpp: making an environment to build it in")
    await _step("make an environment for it", sys.executable, "-m", "venv", str(folder / "env"))
    progress(f"llama.cpp: downloading the source of {PACKAGE} {VERSION}")
    await _step("install what it is built with", *pip, "install", *BUILD_REQUIREMENTS)
    with TemporaryDirectory(dir=folder, prefix="source-") as scratch:
        source_only = ("--no-deps", "--no-build-isolation", "--no-binary", PACKAGE)
        wanted = f"{PACKAGE}=={VERSION}"
        await _step("download its source", *pip, "download", *source_only, "--dest", scratch, wanted)
        source = await asyncio.to_thread(_extract, Path(scratch))
        bindings = ("install", "--no-build-isolation", str(source))
        await _step("install its bindings", "env", f"CMAKE_ARGS={BINDINGS_ONLY}", *pip, *bindings)
        progress("llama.cpp: compiling (some minutes)")
        for command in cmake_commands(source / "vendor" / "llama.cpp", folder):
            await _step("compile it", *command)
    stamp.write_text(VERSION, encoding="utf-8")


def cmake_commands(source: Path, folder: Path) -> Sequence[Sequence[str]]:
    """The commands that build the library alone, in `folder / "library"`."""
    scripts, library = folder / "env" / "bin", folder / "library"
    ninja = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release")
    options = ("-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", *(f"-D{option}=OFF" for option in OPTIONS_OFF))
    cmake = str(scripts / "cmake")
    return (
        (cmake, "-S", str(source), "-B", str(library), *ninja, *options),
        (cmake, "--build", str(library), "--target", "llama"),
    )


async def _step(what: str, *command: str) -> None:
    try:
        await output(f"llama.cpp: cannot {what}", *command)
    except Unavailable as error:
        needs = "it needs a network, a C and a C++ compiler"
        raise ConfigError(f"{error}\n{needs}: see to them and run again, {ADVICE}") from None


def _extract(folder: Path) -> Path:
    """Extract the one archive in a folder; return the folder that was in it."""
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    return source


@dataclass(slots=True)
class LlamaRow:
    """A row of llama.cpp. All of its rows share one process, which serves one request at a time."""

    name: str
    chain: int  # drafted tokens before a pass of the target; 0: none
    worker: WorkerRow
    lookup: bool = False  # the chain is what followed in the text before, no draft model's

    def pids(self) -> Mapping[str, int]:
        """Return the worker's process."""
        return self.worker.pids()

    async def generate(self, request: BenchRequest) -> Sample:
        """Decode a text. The sampler's noise is llama.cpp's, so a seeded text differs from that of our rows."""
        return sample_from_json(await self.worker.request(request.to_json(chain=self.chain, lookup=self.lookup)))


def rows_of_worker(process: WorkerRow) -> list[LlamaRow]:
    """Return the rows of a worker: plain decoding, and speculation with each length of a chain."""
    return [LlamaRow(name, chain, process) for name, chain in CHAINS.items()]


@asynccontextmanager
async def llama_worker(models: Models, folder: Path = FOLDER) -> AsyncIterator[WorkerRow]:
    """Write the models as GGUF, and start a process that serves them; see `llama_files`.

    Raises CheckpointError for models that llama.cpp does not cover, too.
    """
    from bench.peers.gguf import write_gguf
    from outrider.engine.checkpoints.checkpoint import read_config

    config = read_config(models.target)
    with TemporaryDirectory(prefix="outrider-gguf-") as scratch:
        files = {"--target": models.target, "--draft": models.drafter}
        for flag, checkpoint in files.items():
            files[flag] = Path(scratch) / f"{flag.strip('-')}.gguf"
            await asyncio.to_thread(write_gguf, checkpoint, files[flag], models.dtype)
        async with llama_files(files, models.threads, config.unpadded_vocabulary, folder) as started:
            yield started


@asynccontextmanager
async def llama_files(
    files: Mapping[str, Path], threads: int, unpadded_vocabulary: int | None = None, folder: Path = FOLDER
) -> AsyncIterator[WorkerRow]:
    """Start a process that serves GGUF files, by the worker's flags, and wait until it has loaded.

    `unpadded_vocabulary`: ids from this one on are never chosen; None: there are none.
    Raises Unavailable when the process ends.
    """
    from outrider.engine.checkpoints.checkpoint import read_outline

    target = read_outline(files["--target"])
    command = (
        # -P: modules beside the worker must not hide packages of the same name.
        *(str(folder / "env" / "bin" / "python"), "-P", str(WORKER)),
        *(part for flag, file in files.items() for part in (flag, str(file))),
        *("--unpadded-vocabulary", str(unpadded_vocabulary or target.vocabulary)),
        *("--threads", str(threads), "--context", str(min(target.context, CONTEXT))),
    )
    async with worker("llama.cpp", *command, environment=_environment(folder)) as started:
        await started.line()
        yield started


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment in which the bindings find the library, and threads wait as in other rows
    (`outrider.fleet.process_env.set_variables`)."""
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder / "library" / "bin")}
    environment.pop("PYTHONPATH", None)
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
    return environment
