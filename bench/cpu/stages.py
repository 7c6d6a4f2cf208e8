"""Where a process's own time goes: samples of its main thread's stack, each counted for one stage.

A timer of processor time interrupts the process; the innermost function of the stack that has a stage gets the sample.
What other threads use (gRPC's, an engine's) is the difference to the whole process's time.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType

INTERVAL_S = 0.002  # of processor time
OTHER = "event loop, gRPC"
THREADS = "other threads"

_SDK = {(f"outrider/client/{file}.py", ""): "receive" for file in ("_calls", "_stream", "_wire")}

# (end of a file's path, function, or "" for all of the file's functions) -> stage. The innermost one counts.
STAGES: Mapping[str, Mapping[tuple[str, str], str]] = {
    "verifier": {
        ("verifier_svc/steps/step_choice.py", "choose"): "choose",
        ("verifier_svc/scheduler.py", "_forward"): "forward",
        ("verifier_svc/scheduler.py", "_walk"): "walk",
        ("verifier_svc/scheduler.py", "_commit"): "commit",
        ("verifier_svc/steps/step_learning.py", "learn_latest"): "learn",
        ("verifier_svc/router_stream.py", "run"): "send",
        ("verifier_svc/router_stream.py", "_read"): "receive",
        ("outrider/upstream/drafter_sender.py", ""): "publish",
        ("outrider/upstream/servicer.py", ""): "drafters' streams",
    },
    "drafter": {
        ("drafter_svc/scheduler.py", "_choose"): "choose",
        ("drafter_svc/scheduler.py", "_forward"): "forward",
        ("drafter_svc/scheduler.py", "_propose"): "propose",
        ("drafter_svc/mirrored_sessions.py", "_apply"): "apply",
        ("drafter_svc/scheduler.py", "_send_new"): "send",
        ("drafter_svc/upstreams/upstream.py", ""): "streams",
    },
    "router": {
        ("router/sessions/verifier_client.py", "acknowledge"): "acknowledge",
        ("router/sessions/verifier_client.py", ""): "receive",
        ("router/sessions/verifier_link.py", "_read"): "receive",
        ("router/sessions/verifier_link.py", "_write"): "acknowledge",
        ("router/sessions/token_log.py", "append"): "append",
        ("router/sessions/response.py", ""): "detokenize",
        ("router/sessions/outbox.py", ""): "send",
        ("router/api/servicer.py", ""): "send",
        ("router/api/answer_streams.py", ""): "send",
        ("router/sessions/commit_pump.py", "_process_commits"): "learn",
        ("router/sessions/commit_pump.py", "_log_and_send"): "count",
    },
    "gateway": {
        **_SDK,
        ("outrider/gateway/multiplex.py", ""): "merge",
        ("outrider/gateway/serialize.py", ""): "serialize",
        ("outrider/gateway/event_stream.py", ""): "send",
    },
    "client": {
        **_SDK,
        ("outrider/cli/performance/samples.py", ""): "caller",
    },
}


class StageSampler:
    """Counts the samples of this process's main thread by stage, and writes them to a file at each SIGUSR2."""

    def __init__(
        self, role: str, path: Path, between: Callable[[], Sequence[float]] = tuple, *, busy_threads: bool = False
    ) -> None:
        """`between`: returns the seconds between one pass of the engine and the next, for each since it was called.
        `busy_threads`: other threads use most of the processor, so most interrupts find the main thread waiting."""
        self._between = between
        self._busy_threads = busy_threads
        self._stages = STAGES[role]
        self._path = path
        self._counts: Counter[str] = Counter()
        self._known: dict[CodeType, str | None] = {}

    def start(self) -> None:
        """Begin to sample, and to write at each SIGUSR2. Call it in the main thread."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR2, lambda *_: self._write())
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        if self._busy_threads and frame is not None and frame.f_code.co_name == "select":
            return
        while frame is not None:
            code = frame.f_code
            if code not in self._known:
                self._known[code] = self._stage(code.co_filename, code.co_name)
            stage = self._known[code]
            if stage is not None:
                self._counts[stage] += 1
                return
            frame = frame.f_back
        self._counts[OTHER] += 1

    def _stage(self, file: str, function: str) -> str | None:
        for (path, name), stage in self._stages.items():
            if file.endswith(path) and name in ("", function):
                return stage
        return None

    def _write(self) -> None:
        """Write the seconds of each stage so far: shares of the main thread's time by samples, and other threads'."""
        total, main = time.process_time(), time.thread_time()
        samples = sum(self._counts.values()) or 1
        seconds = {stage: main * count / samples for stage, count in self._counts.items()}
        seconds[THREADS] = total - main
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"seconds": seconds, "between": list(self._between())}), encoding="utf-8")
        part.replace(self._path)
