"""A complete cluster whose verifier and drafter compute on one GPU: `python -m bench.gpu_cluster --shape 1b`.

Pads the reference pair, starts `outrider up`, and runs `outrider verify` and `outrider bench` against it. Verifier and
drafter are processes of their own that share the device, so a level of the drafter can hold up a pass of the verifier.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.gpu import ROOT, SHAPES
from outrider.cli.command import FAILURE

READY_S = 180.0  # until the cluster serves
ATTACH_S = 3.0  # until the router has found the drafter
PORT = 7079
CLUSTER = """
[router]
listen = "127.0.0.1:{port}"
[router.models]
target = "{target}"
[[verifier]]
model = "{target}"
device = "{device}"
dtype = "{dtype}"
slots = {slots}
[[drafter]]
model = "{drafter}"
device = "{device}"
dtype = "{dtype}"
slots = {slots}
"""


def main(
    shape: Annotated[str, typer.Option(help=f"Of the target: {', '.join(SHAPES)}.")] = "1b",
    callers: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. [default: 1, 8]")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of counting, for each load and mode.")] = 5.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 2,
    device: Annotated[str, typer.Option()] = "cuda",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    slots: Annotated[int, typer.Option(min=1)] = 32,
) -> None:
    """Start the cluster, verify and measure it. End with status 1 if a text differs or a command fails."""
    with tempfile.TemporaryDirectory(prefix="outrider-gpu-") as scratch:
        folder = Path(scratch)
        target, drafter = folder / "target", folder / "drafter"
        began = time.monotonic()
        _outrider("pad", ROOT / "models" / "target", target, "--shape", SHAPES[shape])
        vocabulary = _vocabulary(target)
        _outrider("pad", ROOT / "models" / "drafter", drafter, "--vocabulary", vocabulary)
        print(f"gpu_cluster: padded in {time.monotonic() - began:.1f} s", flush=True)
        config = folder / "cluster.toml"
        settings = {"port": PORT, "target": target, "drafter": drafter, "device": device, "dtype": dtype}
        config.write_text(CLUSTER.format(**settings, slots=slots), encoding="utf-8")
        began = time.monotonic()
        with (folder / "log").open("wb") as log:
            cluster = subprocess.Popen(_command("up", config), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            _wait_until_ready(cluster, folder / "log")
            time.sleep(ATTACH_S)
            print(f"gpu_cluster: ready in {time.monotonic() - began:.1f} s", flush=True)
            address = ("--address", f"127.0.0.1:{PORT}")
            _outrider("generate", "The ship", "--max-tokens", 16, *address)
            loads = [argument for load in callers or (1, 8) for argument in ("--callers", load)]
            failed = _run(
                "bench",
                ROOT / "examples" / "held_out.jsonl",
                *address,
                *loads,
                "--seconds",
                seconds,
                "--repetitions",
                repetitions,
            )
            options = ("--checkpoint", target, "--no-reference", "--dtype", dtype)  # transformers may choose padding
            failed |= _run("verify", *address, *options)
        finally:
            cluster.send_signal(signal.SIGINT)
            try:
                cluster.wait(30)
            except subprocess.TimeoutExpired:
                cluster.kill()
                cluster.wait()
        print("\n".join((folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]))
    if failed:
        raise SystemExit(FAILURE)


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from outrider.cli.main import app; app()", *map(str, arguments)]


def _run(*arguments: object) -> bool:
    """Run a command of `outrider`, and return whether it failed."""
    print(f"gpu_cluster: outrider {' '.join(map(str, arguments))}", flush=True)
    return subprocess.run(_command(*arguments), check=False, cwd=ROOT).returncode != 0


def _outrider(*arguments: object) -> None:
    if _run(*arguments):
        raise SystemExit(FAILURE)


def _wait_until_ready(cluster: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a text can be generated."""
    ends = time.monotonic() + READY_S
    probe = _command("generate", "a", "--max-tokens", 1, "--address", f"127.0.0.1:{PORT}")
    while "drafter-0 is ready" not in log.read_text(encoding="utf-8", errors="replace") or (
        subprocess.run(probe, check=False, cwd=ROOT, capture_output=True).returncode
    ):
        if cluster.poll() is not None or time.monotonic() > ends:
            print(log.read_text(encoding="utf-8", errors="replace")[-6000:])
            raise SystemExit(FAILURE)
        time.sleep(1.0)


def _vocabulary(target: Path) -> int:
    content = json.loads((target / "config.json").read_text(encoding="utf-8"))
    return int(content["vocab_size"])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
