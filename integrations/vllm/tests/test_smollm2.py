"""vLLM with SmolLM2, which other people made and use, and its GGUF file as a drafter."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import OUTRIDER, REPOSITORY, Vllm, running_drafter, wait_until

# vLLM 0.32 reads no GGUF file by itself, so it gets the same weights as a folder.
CONVERSION = """
import sys
import torch
from transformers import AutoTokenizer
from outrider.example_files import SMOLLM2, real_file
from outrider.engine.transformers.pretrained import from_pretrained
from outrider.errors import Unavailable
try:
    file = real_file(SMOLLM2)
except Unavailable as error:
    sys.exit(f"unavailable: {error}")
from_pretrained(file, dtype=torch.float32).save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(sys.argv[1])
print(file)
"""
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "List five fruits.",
    "Explain photosynthesis in one paragraph.",
    "Write a Python function that adds two numbers.",
    "Give me three tips for sleeping well.",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    folder = tmp_path_factory.mktemp("smollm2")
    command = [OUTRIDER, "-P", "-c", CONVERSION, str(folder)]
    converted = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if "unavailable" in converted.stderr:
        pytest.skip("the package index cannot be reached")
    assert converted.returncode == 0, converted.stderr
    with running_drafter(model=Path(converted.stdout.strip())) as drafter:
        vllm = Vllm([drafter.address], folder)
        wait_until(lambda: vllm.drafts.drafters)
        yield vllm


def answers(vllm: Vllm, temperature: float, *, drafted: bool) -> list[str]:
    """The answers of a chat."""
    from vllm import SamplingParams

    said = {"outrider_drafts": int(drafted), "outrider_shared_noise": 1}
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=48, extra_args=said)
    chats = [[{"role": "user", "content": it}] for it in QUESTIONS]
    return [it.outputs[0].text for it in vllm.llm.chat(chats, params, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_a_chat_do_not_depend_on_drafts(temperature: float, smollm2: Vllm) -> None:
    plain = answers(smollm2, temperature, drafted=False)
    assert temperature or "Paris" in plain[0]
    before = smollm2.drafts.counts.accepted
    assert answers(smollm2, temperature, drafted=True) == plain
    assert smollm2.drafts.counts.accepted > before + 100
