"""What the package's layers promise: the wire's stubs are current, and the SDK is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import outrider
from protos.generate import generate

ROOT = Path(__file__).parents[1]


def test_regenerating_the_stubs_changes_nothing(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "outrider" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "outrider" / "v1").glob("*_pb2*.py*")}
    assert committed == fresh


def test_the_sdk_loads_nothing_beyond_grpc_protobuf_and_the_api_of_opentelemetry() -> None:
    """In a process where everything else that the package uses cannot be imported."""
    script = """
import sys
for name in ("torch", "numpy", "redis", "pydantic", "tokenizers", "safetensors", "typer", "rich", "grpc_health",
             "grpc_reflection", "opentelemetry.sdk", "prometheus_client", "router", "verifier_svc", "drafter_svc"):
    sys.modules[name] = None
import outrider
outrider.Client("127.0.0.1:1").close()
for name in outrider.__all__:
    getattr(outrider, name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_package_alone_loads_nothing() -> None:
    script = "import sys, outrider, outrider.core; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 0


def test_the_package_exports_exactly_its_public_names() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    assert not hasattr(outrider, "Server")
