"""A vLLM in this process, and drafters in their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {  # of vLLM, which is imported later
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

REPOSITORY = Path(__file__).resolve().parents[3]
TARGET, DRAFTER = REPOSITORY / "models/target", REPOSITORY / "models/drafter"
OUTRIDER = os.environ.get("OUTRIDER_PYTHON", sys.executable)  # a Python in whose environment drafters run


@contextmanager
def running_drafter(*more: str, model: Path = DRAFTER, listen: str = "127.0.0.1:0") -> Iterator[Drafter]:
    """A drafter process without Redis."""
    command = [OUTRIDER, "-P", "-m", "outrider.cli", "drafter", "--model", str(model), "--listen", listen]
    process = subprocess.Popen([*command, "--slots", "64", *more], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    try:
        yield Drafter(process.stdout.readline().rpartition(" ")[2].strip(), process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Drafter:
    """A drafter's address and its process."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address = address
        self.process = process


class Vllm:
    """vLLM with our proposer in this process."""

    def __init__(self, drafters: list[str], model: Path = TARGET, **more: Any) -> None:
        from vllm import LLM

        settings = {"drafters": drafters, "wait_ms": 100.0, "adaptive": False} | more.pop("settings", {})
        self.llm = LLM(
            str(model),
            **{"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "disable_log_stats": True} | more,
            additional_config={"outrider": settings},
            speculative_config={
                "method": "custom_class",
                "model": "outrider_vllm.RemoteDrafter",
                "num_speculative_tokens": 4,
            },
        )
        self.adapter: Any = None  # of all requests
        core = self.llm.llm_engine.engine_core.engine_core
        self.drafter = core.model_executor.driver_worker.worker.model_runner.drafter

    @property
    def drafts(self) -> Any:
        """The drafts of the worker."""
        return self.drafter._drafts

    def outputs(self, count: int, *, drafted: bool, prompts: int = 8, noise: bool = True, **params: Any) -> list[Any]:
        """Generate up to `count` tokens for several prompts at once; their outputs, in order."""
        from vllm import SamplingParams

        # A request without a seed of its own would draw by its name.
        said = {"outrider_drafts": int(drafted), "outrider_shared_noise": int(noise)}
        wanted = [
            SamplingParams(**{"seed": 100 + number, "max_tokens": count, "extra_args": said} | params)
            for number in range(prompts)
        ]
        asked = [{"prompt_token_ids": prompt(number)} for number in range(prompts)]
        answers = self.llm.generate(asked, wanted, use_tqdm=False, lora_request=self.adapter)
        return [it.outputs[0] for it in answers]

    def texts(self, count: int, *, drafted: bool, **params: Any) -> list[list[int]]:
        """Generate as `outputs` does; the tokens alone."""
        return [list(it.token_ids) for it in self.outputs(count, drafted=drafted, **params)]


def prompt(number: int) -> list[int]:
    """Some ids of the model's vocabulary, of a length that differs."""
    return [(37 * number + 11 * place) % 900 + 300 for place in range(8 + 5 * number)]


def wait_until(true: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait until it is true."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
