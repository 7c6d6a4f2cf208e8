"""The compiled module under the compilers' sanitizers, and for a million passes."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from outrider import _native
from tests.engine.cpu.exercise import KINDS, VOCABULARY, make, segment
from tests.hostile.rig import resident_bytes

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "outrider/engine/cpu/src"


def library(name: str) -> str:
    """Where the compiler has it."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sanitizers", "runtime"),
    [("address,undefined", "libasan.so"), ("thread", "libtsan.so")],
    ids=["memory", "threads"],
)
def test_sanitizers_find_no_error(sanitizers: str, runtime: str, tmp_path: Path) -> None:
    """Memory out of bounds or gone, undefined behaviour, two threads at one place without order."""
    built = tmp_path / "_native.so"
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wno-psabi"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-DPy_LIMITED_API=0x030b0000"]
    flags += ["-DOUTRIDER_EMULATED_AMX"]  # so that what lies around the tiles is seen, too
    include = f"-I{sysconfig.get_paths()['include']}"
    sources = [str(source) for source in sorted(SOURCES.rglob("*.cpp"))]
    subprocess.run(["g++", *flags, include, *sources, "-o", str(built)], check=True)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.cpu.exercise", str(built)],
        cwd=ROOT,
        env=os.environ
        | {
            "LD_PRELOAD": f"{library(runtime)} {library('libstdc++.so.6')}",  # the interpreter itself has neither
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter leaves much behind; leaks are looked for below
            "TSAN_OPTIONS": "halt_on_error=1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.startswith("exercise: passes=")


def test_a_million_passes_leak_no_memory() -> None:
    dice = np.random.default_rng(3)
    model, _, _ = make(_native, dice, KINDS[0], "", 1, ())
    segments = [segment(dice, 0)]
    segments[0].tokens, segments[0].positions = segments[0].tokens[:1], segments[0].positions[:1]
    segments[0].mask = segments[0].wanted = None
    logits, tokens, scores = np.zeros((1, VOCABULARY), np.float32), np.zeros((1, 2), np.int64), np.zeros((1, 2))
    draws, some, none = [(5, 1.0)], np.array([1, 2, 3]), np.empty(0, np.int64)

    def passes(count: int) -> None:
        for _ in range(count):
            model.run(segments, draws, 2, True, logits, tokens, scores, None)
            model.move(0, some, some)
            model.copy(0, 1, 40)
            sampler = _native.Sampler(
                *(4, 1, 1.0, 0, 0.9, 0.0, (1.1, 0.0, 0.0), none, scores[0, :0], none, none, False, none, 0)
            )
            sampler.extend(some, True)

    passes(20_000)
    before = resident_bytes()
    passes(1_000_000)
    assert resident_bytes() - before < 2 << 20  # two bytes a pass
