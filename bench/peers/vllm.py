"""vLLM on processors as a peer, from `.vllm` (`make test-vllm` installs it), and its rows."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from bench.rows.processes import ROOT
from bench.rows.requests import BenchRequest
from bench.rows.row import WorkerRow, worker
from outrider.cli.performance.samples import Sample
from outrider.engine.checkpoints.checkpoint import Weights, config_json, copy_tokenizer
from outrider.engine.checkpoints.stored_tensors import as_float32
from outrider.errors import Unavailable

VLLM = ROOT / ".vllm"
CONTEXT = 2048  # tokens
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(slots=True)
class VllmRow:
    """A row of vLLM: a process with an engine."""

    name: str
    worker: WorkerRow

    def pids(self) -> Mapping[str, int]:
        """Return the worker's process."""
        return self.worker.pids()

    async def generate(self, request: BenchRequest) -> Sample:
        """Decode a text. vLLM says when each step ended, not how many tokens it had: these are spread evenly."""
        asked = {"prompts": [request.prompt], "tokens": request.max_tokens, "callers": 1, "noise": False}
        asked |= {"temperature": request.temperature, "seed": request.seed}
        answer = json.loads(await self.worker.request(json.dumps(asked)))
        ends, (tokens,) = answer["ends"], answer["texts"]
        arrivals = np.interp(np.linspace(0, len(ends) - 1, len(tokens)), range(len(ends)), ends)
        return Sample(tuple(tokens), tuple(arrivals.tolist()), len(ends))


def vllm_environment() -> dict[str, str]:
    """Return the environment of vLLM in one process, with our package for it."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(VLLM / "lib/libiomp5.so"),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'integrations/vllm'}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }


@asynccontextmanager
async def vllm_rows(target: Path, scratch: Path, threads: int) -> AsyncIterator[list[VllmRow]]:
    """Start an engine without drafts and one with n-grams, in float32, and wait until they have loaded.

    `target`: a GGUF file, which vLLM does not load on processors: it gets the dequantized weights, in `scratch`. Raises
    Unavailable when vLLM is not installed, and when a process ends.
    """
    if not (VLLM / ".installed").exists():
        raise Unavailable("vLLM is not installed; make test-vllm installs it")
    _write_folder(target, folder := scratch / "dequantized")
    environment = vllm_environment() | {"OMP_NUM_THREADS": str(threads)}
    async with AsyncExitStack() as stack:
        rows = []
        for name, speculation in (("vLLM", None), ("vLLM, n-grams", NGRAM)):
            told = {"model": str(folder), "dtype": "float32", "max_model_len": CONTEXT}
            command = (str(VLLM / "bin/python"), "-P", "-m", "bench.peers.vllm_worker")
            line = json.dumps(told | {"speculative_config": speculation})
            started = await stack.enter_async_context(worker(name, *command, line, environment=environment))
            await started.line()
            rows.append(VllmRow(name, started))
        yield rows


def _write_folder(file: Path, folder: Path) -> None:
    """Write a GGUF file as a folder with weights in float32."""
    import torch

    weights = Weights(file)
    shapes = {name: weights.shape(name) for name in weights.files}
    tensors = {name: torch.from_numpy(as_float32(weights.array(name, *shape)).copy()) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(file)), encoding="utf-8")
    copy_tokenizer(file, folder)
