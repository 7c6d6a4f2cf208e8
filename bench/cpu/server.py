"""Runs one server of the benchmark's cluster: `python -m bench.cpu.server SCRIPT ROLE FLAGS...`.

A verifier or drafter gets an engine that costs nothing in place of the checkpoint's; all else is as it is served.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cpu.engine import ScriptedEngine
from bench.cpu.stages import StageSampler
from outrider.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Script:
    """What the servers of one cluster are to simulate, and where they write what they measure."""

    acceptance: float  # share of positions at which the drafter's likeliest token is the target's
    pass_s: float  # that a pass of the target sleeps
    folder: str  # for a file `NAME.json` of each process

    def to_json(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))


def main() -> None:
    script, name, *arguments = sys.argv[1:]
    serve(Script(**json.loads(script)), name, arguments)


def serve(script: Script, name: str, arguments: list[str]) -> None:
    """Run `outrider ARGUMENTS`, of which the first is the role, until a signal."""
    role, engines = arguments[0], list[ScriptedEngine]()

    def load(path: Path, *, slots: int, rows: int | None = None, **_: Any) -> Engine:
        drafts = role == "drafter"
        pass_s = 0.0 if drafts else script.pass_s
        engine = ScriptedEngine(
            path, slots=slots, rows=rows, acceptance=script.acceptance, drafts=drafts, pass_s=pass_s
        )
        engines.append(engine)
        return engine

    def between() -> list[float]:
        return [seconds for engine in engines for seconds in engine.between]

    StageSampler(role, Path(script.folder) / f"{name}.json", between).start()

    if role == "verifier":
        import verifier_svc.server as server

        server.load_engine = load  # type: ignore[attr-defined]
    elif role == "drafter":
        import drafter_svc.loading as loading

        loading.load_engine = load  # type: ignore[attr-defined]
    from outrider.cli.main import app

    app(arguments, prog_name="outrider")


if __name__ == "__main__":
    main()
