"""A vLLM in a process of its own, in its own environment: `python -m bench.peers.vllm_worker JSON`.

It writes "ready", then reads a request a line, and writes what it took: both JSON. See `bench.vllm`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(told: dict[str, Any]) -> None:
    """Serve requests until the input ends. `told`: arguments of `vllm.LLM`."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints
    from vllm import LLM

    from outrider_vllm.verification import repair

    repair()  # verification on processors is wrong without, whoever drafts
    llm = LLM(**told, enforce_eager=True, max_num_seqs=8)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    execute, ends = runner.execute_model, list[float]()

    def counted(*arguments: Any, **named: Any) -> Any:
        found = execute(*arguments, **named)
        ends.append(time.perf_counter())
        return found

    runner.execute_model = counted
    out.write("ready\n")
    for line in sys.stdin:
        ends.clear()
        began = time.perf_counter()
        answer = generate(llm, json.loads(line))
        out.write(json.dumps(answer | {"steps": len(ends), "ends": [end - began for end in ends]}) + "\n")


def generate(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts, `callers` at once."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": it} for it in asked["prompts"]]
    params = [
        SamplingParams(
            temperature=asked["temperature"],
            seed=asked.get("seed", 0) + number,
            max_tokens=asked["tokens"],
            ignore_eos=True,
            extra_args={"outrider_shared_noise": asked["noise"]},
        )
        for number in range(len(prompts))
    ]
    texts, began = [], time.perf_counter()
    for first in range(0, len(prompts), asked["callers"]):
        some = slice(first, first + asked["callers"])
        texts += [list(it.outputs[0].token_ids) for it in llm.generate(prompts[some], params[some], use_tqdm=False)]
    return {"seconds": time.perf_counter() - began, "texts": texts}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
