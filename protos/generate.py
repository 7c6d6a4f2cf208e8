"""Generates `outrider/v1` from `protos/`. usage: python -m protos.generate [FOLDER]"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).parent


def generate(destination: Path) -> None:
    """Write the stubs of every proto below `protos/` into `destination`/outrider/v1."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "pyi", "grpc_python")]
    arguments = ["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *sources]
    if protoc.main(arguments):
        raise SystemExit("protoc failed; its message is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
