"""Saves a run as JSON under bench/results/."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.options import BenchOptions
from bench.peers.llama_cpp import VERSION
from bench.report.figures import BenchResults, Measurement
from bench.rows.processes import ROOT
from outrider.cli.verification.compare import repeated_share

FOLDER = ROOT / "bench" / "results"
FORMAT = 1  # of the files; raised when what a figure means changes, which outdates the tables made of older ones
VERSIONS = ("torch", "transformers", "grpcio", "numpy", "redis")


def save(options: BenchOptions, results: BenchResults, name: str | None, seconds: float, line: str) -> Path:
    """Write NAME.json, or a file named by the time, atomically, and return its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name or time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "format": FORMAT,
        "line": line,
        "seconds": round(seconds),
        "machine": machine(),
        "options": asdict(options),
        "llama_cpp_python": VERSION if options.llama_cpp else None,
        "limits": {str(target): asdict(limit) for target, limit in results.limits.items()},
        "profiles": [asdict(profile) | {"of_floor": profile.of_floor} for profile in results.profiles],
        "memory": [asdict(entry) for entry in results.memory],
        "takes": [_take(take) for take in results.takes],
        "firsts": [_take(take) for take in results.firsts],
        "loads": [asdict(load) for load in results.loads],
        "cold": [asdict(entry) for entry in results.cold],
        "far": [_take(take) for take in results.far],
        "tiers": [_take(take) for take in results.tiers],
        "settling": [asdict(entry) for entry in results.settling],
        "gpu": results.gpu,
        "formats": [asdict(entry) for entry in results.formats],
        "passes": [asdict(entry) | {"ms": entry.ms, "over_limit": entry.over_limit} for entry in results.passes],
    }
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(_plain(content), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path


def machine() -> dict[str, Any]:
    """Return the properties of the machine and the software that the figures depend on."""
    cpu = platform.processor()
    memory_gb = math.nan
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(memory_gb, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in VERSIONS},
        "revision": revision.stdout.strip(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _take(take: Measurement) -> dict[str, Any]:
    """Return the figures of a take, without its text."""
    sample = take.sample
    gaps = sorted(sample.gaps)
    return {
        "target": take.target,
        "row": take.row,
        "prompt": take.prompt,
        "repetition": take.repetition,
        "temperature": take.temperature,
        "link": take.link,
        "idle": take.idle and take.idle._asdict(),
        "tokens": len(sample.tokens),
        "tokens_per_s": sample.tokens_per_s,
        "first_token_s": sample.first_token_s,
        "steps": sample.steps,
        "wire_bytes": sample.wire_bytes,
        "gaps_ms": [round(gap * 1e3, 2) for gap in gaps],
        "reached_by_depth": sample.reached_by_depth,
        "tried_by_depth": sample.tried_by_depth,
        "repeated_4_grams": repeated_share([sample.tokens]),
    }


def _plain(value: Any) -> Any:
    """Return a value with NaN and paths replaced, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
