"""OpenVINO GenAI in a separate process, run by the interpreter of `build/openvino` (bench.peers.openvino).

`python -P openvino_worker.py --target FILE --threads N [--lookup]`. It imports nothing of Outrider. When it has loaded,
it writes "ready" to stdout, and then answers each line of stdin, a `BenchRequest`, with a `Sample` in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np

LOOKUP = {"max_ngram_size": 3, "num_assistant_tokens": 5}  # of OpenVINO's own example of prompt lookup


def main() -> None:
    """Load the model and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    import openvino_genai  # type: ignore[import-not-found]

    more = {"prompt_lookup": True} if options.lookup else {}
    pipeline = openvino_genai.LLMPipeline(options.target, "CPU", INFERENCE_NUM_THREADS=options.threads, **more)
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(json.dumps(generate(pipeline, json.loads(line), LOOKUP if options.lookup else {})) + "\n")


def generate(pipeline: Any, request: dict[str, Any], settings: dict[str, int]) -> dict[str, Any]:
    """Decode a text."""
    import openvino  # type: ignore[import-not-found]
    import openvino_genai

    arrivals: list[float] = []

    class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
        def write(self, tokens: Any) -> Any:
            count = len(tokens) if isinstance(tokens, list) else 1
            arrivals.extend([time.perf_counter() - began] * count)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    asked = openvino_genai.GenerationConfig()
    asked.max_new_tokens, asked.ignore_eos = request["max_tokens"], True
    if request["temperature"] > 0.0:
        asked.do_sample, asked.temperature, asked.rng_seed = True, request["temperature"], request["seed"]
    for name, value in settings.items():
        setattr(asked, name, value)
    ids = np.array([request["prompt"]], np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    began = time.perf_counter()
    tokens = [int(token) for token in pipeline.generate(inputs, asked, Clock()).tokens[0]]
    assert len(tokens) == len(arrivals) == request["max_tokens"]
    empty: list[int] = []
    sample = {"tokens": tokens, "arrivals": arrivals, "steps": len(set(arrivals))}
    return sample | {"wire_bytes": 0, "reached_by_depth": empty, "tried_by_depth": empty}


if __name__ == "__main__":
    main()
