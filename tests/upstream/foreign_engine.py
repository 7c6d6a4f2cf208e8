"""An engine that is not a verifier, with drafters from elsewhere: it chooses its tokens itself, one text at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.upstream.remote_drafts import RemoteDrafts
from tests.engine.small_checkpoints import MODELS, prompt

PROMPT = (301, 17, 25, 1012, 9, 77)
LONG = 2**31 - 1


@contextmanager
def drafter(*more: str, model: Path = MODELS / "drafter") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A drafter's address and its process. It has no Redis."""
    command = [sys.executable, "-P", "-m", "outrider.cli", "drafter", "--model", str(model), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--slots", "8", *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().rpartition(" ")[2].strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until(true: Callable[[], object], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class ForeignEngine:
    """The reference target, which verifies chains."""

    def __init__(self) -> None:
        settings = EngineSettings(dtype="float32", slots=1, rows=600, threads=1)
        self._engine = CpuEngine.load(MODELS / "target", settings)
        self.steps = 0

    def text(
        self,
        contract: Contract,
        count: int,
        drafts: RemoteDrafts | None = None,
        tokens: Sequence[int] = PROMPT,
    ) -> list[int]:
        """Generate tokens, with drafts or without, at some 5 ms a step."""
        row = f"row of {contract.seed}"
        text, chosen, chain = [*tokens], list[int](), list[int]()
        sampler = Sampler(contract, self._engine.vocabulary, text, len(text))
        if drafts is not None:
            drafts.open(row, text, contract)
        self._engine.release(0, 0)
        read = 0
        while len(text) < len(tokens) + count:
            if drafts is not None:
                [chain] = drafts.step([(row, chosen)])
            logits = self._engine.forward([prompt(0, np.array(text[read:] + chain), read, wanted=len(chain) + 1)])
            self.steps += 1
            chosen = []
            for place in range(len(chain) + 1):
                chosen.append(sampler.choose(logits[place], chosen).token)
                if place == len(chain) or chain[place] != chosen[-1]:
                    break
            text += chosen
            sampler.extend(chosen)
            read = len(text) - 1
            self._engine.release(0, read)
            time.sleep(0.005)
        if drafts is not None:
            drafts.close(row)
        return text[len(tokens) : len(tokens) + count]
