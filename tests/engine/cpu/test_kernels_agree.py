"""The kernels of every instruction set that this processor has, without an engine around them; `make arm`: arm64's."""

import subprocess
from pathlib import Path

import pytest

from outrider import _native

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "outrider/engine/cpu/src"


@pytest.mark.extended
@pytest.mark.parametrize("tiles", [False, True])
def test_kernels_of_every_instruction_set_equal_the_portable_ones(tiles: bool, tmp_path: Path) -> None:
    """`tiles`: with Intel's in emulation, as far as this processor has what is used beside them."""
    sets = {*_native.instruction_sets()}
    sets |= {"amx"} if tiles and "avx512_bf16" in sets else set()
    program = tmp_path / "kernels_agree"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    flags += ["-DOUTRIDER_EMULATED_AMX"] * tiles
    sources = [Path(__file__).with_name("kernels_agree.cpp"), *SOURCES.glob("kernels/*.cpp")]
    subprocess.run(["c++", *flags, f"-I{SOURCES}", *map(str, sources), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith(f"kernels_agree: sets={len(sets)} wrong=0\n")
