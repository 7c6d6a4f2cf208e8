"""All that is to be seen on an accelerator, in one command: `python -m bench.gpu_day`.

Parts run one after another, each in a process of its own with a limit of time. After each of them its output and a JSON
file with its status lie in the output folder. What fails is named and the rest goes on. A second run in the same folder
runs only what has not passed. It needs torch, numpy, safetensors, tokenizers, typer, rich, pytest and transformers, and
no network: on a machine without pip it runs from a checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.command import FAILURE

ROOT = Path(__file__).parents[1]
KILL_S = 5.0  # time in which a part has to end after its limit
TESTS = (
    "tests/engine/gpu",
    "tests/verifier/test_drawn_by_engine.py",
    "tests/drafter/test_ranked_by_engine.py",
    "tests/drafter/sessions/test_eagle_session.py",
    "tests/drafter/test_grown_trees.py",
    "tests/engine/test_heads.py",
    "tests/verifier/proposers/test_head_drafts.py",
    "tests/verifier/test_preempted_features.py",
    "tests/verifier/test_begun_steps.py",
    "--deselect=tests/verifier/test_drawn_by_engine.py::test_noise_is_not_computed_twice",  # of the compiled sampler
)
# The folder's conftest.py is for tests with servers, whose libraries a machine with a GPU need not have.
PYTEST = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the day."""

    name: str
    arguments: Sequence[str]  # of Python
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = ()  # the command that runs Python

    @property
    def missing(self) -> str:
        """The program that is not here; empty if nothing is missing."""
        return next((it for it in self.program[:1] if shutil.which(it) is None), "")


def _profile(name: str, *arguments: str) -> Part:
    """Return the part that shows where the time of steps goes."""
    return Part(f"profile-{name}", ("-m", "bench.gpu_profile", *arguments), 150)


def _gpu(shape: str, batch: int, *more: str) -> Part:
    """Return the part that measures one shape with one number of texts."""
    name = "-".join((shape, str(batch), *(it.strip("-") for it in more)))
    return Part(name, ("-m", "bench.gpu", "--shape", shape, "--batch", str(batch), *more), 300)


DRAFTER = ("--shape", "1b", "--best", "64", "--levels", "3")
ADAPTERS = ("--adapters", "0", "--adapters", "1", "--adapters", "4")
PARTS = (
    Part("parity", ("-m", "bench.gpu_parity"), 120),
    Part("tests", (*PYTEST, *TESTS), 300, {"OUTRIDER_TEST_DEVICE": "cuda"}),
    Part(
        "sanitizer",
        ("-m", "bench.gpu_parity", "--kind", "moves", "--model", "models/drafter"),
        240,
        program=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
    ),
    _profile("8b-1", "--rows", "1", "--rows", "16"),
    _profile("8b-32", "--texts", "32", "--rows", "1", "--rows", "4"),
    _profile("8b-1-heads", "--rows", "8", "--levels", "4", "--heads"),
    _profile("8b-8-heads", "--texts", "8", "--rows", "4", "--levels", "3", "--heads"),
    _profile("8b-8-adapters", "--texts", "8", "--rows", "1", *ADAPTERS),
    _profile("8b-8-adapters-float8", "--texts", "8", "--rows", "1", "--dtype", "float8", *ADAPTERS),
    _profile("1b-1-drafter", *DRAFTER, "--rows", "1", "--rows", "4"),
    _profile("8b-1-float8", "--rows", "1", "--rows", "16", "--dtype", "float8"),
    _profile("1b-1-drafter-float8", *DRAFTER, "--rows", "4", "--dtype", "float8"),
    Part("cluster-1b", ("-m", "bench.gpu_cluster", "--shape", "1b"), 200),
    Part("cluster-8b", ("-m", "bench.gpu_cluster", "--shape", "8b"), 300),
    _gpu("8b", 1, "--dtype", "float8"),
    _gpu("8b", 1, "--drafter-dtype", "float8"),
    _gpu("8b", 1, "--drafter", "reference"),
    *(_gpu(shape, batch) for shape in ("1b", "8b") for batch in (1, 8, 32)),
)


def main(
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = ROOT / "bench" / "results" / "gpu_day",
    parts: Annotated[list[str] | None, typer.Option("--part", help="May be repeated. [default: all]")] = None,
    gpt_fast: Annotated[Path | None, typer.Option(help="A checkout of gpt-fast, measured beside plain steps.")] = None,
    within: Annotated[float, typer.Option(min=1, help="Seconds for all parts together.")] = 2700,
) -> None:
    """Run the parts that have not passed yet. End with status 1 if one fails."""
    known = {part.name: part for part in PARTS}
    if gpt_fast is not None:
        known |= {
            name: replace(part, arguments=(*part.arguments, "--gpt-fast", str(gpt_fast)))
            for name, part in known.items()
            if name in ("1b-1", "8b-1", "8b-8")
        }
    if unknown := sorted(set(parts or ()) - known.keys()):
        raise typer.BadParameter(f"{', '.join(unknown)}: must be one of {', '.join(known)}")
    output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + within
    statuses = {name: run(part, output, ends) for name, part in known.items() if not parts or name in parts}
    print("gpu_day: " + " ".join(f"{name}={status}" for name, status in statuses.items()))
    if set(statuses.values()) & {"failed", "timed-out"}:
        raise SystemExit(FAILURE)


def run(part: Part, output: Path, ends: float) -> str:
    """Run a part unless it has passed before, and return its status: passed, failed, timed-out, missing or no-time."""
    result = output / f"{part.name}.json"
    if result.exists() and json.loads(result.read_text(encoding="utf-8"))["status"] == "passed":
        return "passed"
    limit = min(part.limit_s, ends - time.monotonic())
    if part.missing or limit <= 0:
        return f"missing:{part.missing}" if part.missing else "no-time"
    print(f"gpu_day: {part.name}: at most {limit:.0f} s", flush=True)
    log, began = output / f"{part.name}.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*part.program, sys.executable, *part.arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
                "PYTHONUNBUFFERED": "1",
                **part.environment,
            },
        )
        try:
            status = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed-out"
            process.terminate()
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    content = {"status": status, "seconds": round(time.monotonic() - began, 1), "lines": lines[-40:]}
    result.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for line in lines[-40:]:
        print(f"  {line}")
    return status


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
