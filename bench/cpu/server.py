"""Runs one server of the benchmark's cluster: `python -m bench.cpu.server SCRIPT ROLE FLAGS...`.

A verifier or drafter gets an engine that costs nothing in place of the checkpoint's, unless the script is native;
the rest is as it is served.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cpu.engine import ScriptedEngine
from bench.cpu.stages import StageSampler
from outrider.core.sampling.noise import Draw
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.engine.loading import load_engine


@dataclass(frozen=True, slots=True)
class Script:
    """What the servers of one cluster are to simulate, and where they write what they measure."""

    acceptance: float  # share of positions at which the drafter's likeliest token is the target's
    pass_s: float  # seconds that a pass of the target sleeps
    folder: str  # for a file `NAME.json` of each process
    native: bool = False  # the checkpoint's own engine; only the time between its passes is measured

    def to_json(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))


def main() -> None:
    script, name, *arguments = sys.argv[1:]
    serve(Script(**json.loads(script)), name, arguments)


def serve(script: Script, name: str, arguments: list[str]) -> None:
    """Run `outrider ARGUMENTS`, of which the first is the role, until a signal."""
    role, gaps = arguments[0], list[list[float]]()

    def load(path: Path, *, slots: int, rows: int | None = None, **others: Any) -> Engine:
        if script.native:
            own = load_engine(path, slots=slots, rows=rows, **others)
            gaps.append(_timed(own))
            return own
        drafts = role == "drafter"
        pass_s = 0.0 if drafts else script.pass_s
        engine = ScriptedEngine(
            path, slots=slots, rows=rows, acceptance=script.acceptance, drafts=drafts, pass_s=pass_s
        )
        gaps.append(engine.between)
        return engine

    def between() -> list[float]:
        found = [seconds for gap in gaps for seconds in gap]
        for gap in gaps:
            gap.clear()
        return found

    StageSampler(role, Path(script.folder) / f"{name}.json", between, busy_threads=script.native).start()

    if role == "verifier":
        import verifier_svc.server as server

        server.load_engine = load  # type: ignore[attr-defined]
    elif role == "drafter":
        import drafter_svc.loading as loading

        loading.load_engine = load  # type: ignore[attr-defined]
    from outrider.cli.main import app

    app(arguments, prog_name="outrider")


def _timed(engine: Engine) -> list[float]:
    """Have an engine add the seconds from each pass to the next one to a list, and return the list."""
    between, sample, ended = list[float](), engine.sample, time.perf_counter()

    def timed(segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        nonlocal ended
        between.append(time.perf_counter() - ended)
        try:
            return sample(segments, draws, best)
        finally:
            ended = time.perf_counter()

    engine.sample = timed  # type: ignore[method-assign]
    return between


if __name__ == "__main__":
    main()
