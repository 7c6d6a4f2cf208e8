"""Holds the pinned dependencies against known vulnerabilities: `python -m tests.audit`, which is `make audit`.

The advisories come from osv.dev, by pip-audit, with one question for each package. `make lint` adds `--quick`: what
passed within the last day passes, and where the service cannot be reached within two seconds, one line states that
nothing was audited. No list of advisories that is up to date can be installed
instead: the newest one among Python packages, `safety-db`, is of 2021.

An advisory that does not touch Outrider goes into pyproject.toml, at `[tool.audit]`, with its reason.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICE = "https://api.osv.dev/v1/query"
PATIENCE_S = 2.0  # for the service's first answer
CALL_S = 10  # for each later one
PASSED = ROOT / "build" / "audited"  # holds a digest of the pins that passed last
FRESH_S = 24 * 3600


def is_reachable(url: str, patience_s: float) -> bool:
    """Return whether an HTTP server answers, whatever its answer. Proxies are those of the environment."""
    answered = threading.Event()

    def call() -> None:
        try:
            urllib.request.urlopen(url, timeout=patience_s).close()
        except urllib.error.HTTPError:
            pass  # an error is an answer, too
        except OSError:
            return
        answered.set()

    caller = threading.Thread(target=call, daemon=True)  # names are looked up without a timeout
    caller.start()
    caller.join(patience_s)
    return answered.is_set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return pip-audit's exit status, 1 where the service cannot be reached, or 0 then with `--quick`."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--service", default=SERVICE)
    parser.add_argument("--requirement", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--settings", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--passed", type=Path, default=PASSED)
    given = parser.parse_args(arguments)
    audited = hashlib.sha256(given.requirement.read_bytes() + given.settings.read_bytes()).hexdigest()
    if given.quick and _has_passed(given.passed, audited):
        return 0
    if not is_reachable(given.service, PATIENCE_S):
        print(f"audit: not run, because {given.service} cannot be reached; where it can be, run `make audit`")
        return 0 if given.quick else 1
    ignored = tomllib.loads(given.settings.read_text(encoding="utf-8"))["tool"]["audit"]["ignore"]
    command = [sys.executable, "-m", "pip_audit", "--requirement", given.requirement, "--no-deps", "--disable-pip"]
    command += ["--vulnerability-service", "osv", "--osv-url", given.service, "--timeout", str(CALL_S)]
    command += ["--progress-spinner", "off", *(part for advisory in ignored for part in ("--ignore-vuln", advisory))]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        given.passed.parent.mkdir(exist_ok=True)
        given.passed.write_text(audited)
    return status


def _has_passed(passed: Path, audited: str) -> bool:
    fresh = passed.exists() and time.time() - passed.stat().st_mtime < FRESH_S
    return fresh and passed.read_text() == audited


if __name__ == "__main__":
    sys.exit(main())
