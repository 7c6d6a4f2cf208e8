"""Requests that are preempted, because their KV does not fit, and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from running import TARGET, Drafter, Vllm, wait_until

RANK = 8


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A low-rank adapter that changes the model's texts."""
    import json

    folder = tmp_path_factory.mktemp("adapter")
    config = json.loads((TARGET / "config.json").read_text())
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim", width // heads)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) / width**0.5
        weights[f"{name}.lora_B.weight"] = torch.randn(heads * size, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def vllm(drafter: Drafter) -> Vllm:
    engine = Vllm(
        [drafter.address], block_size=32, num_gpu_blocks_override=18, enable_prefix_caching=False,
        enable_lora=True, max_lora_rank=RANK, max_num_seqs=8,
    )  # fmt: skip
    wait_until(lambda: engine.drafts.drafters)
    return engine


def test_preempted_requests_go_on_with_the_same_text(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = vllm.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *it, **named: (preempted.append(1), preempt(*it, **named))[1]
    )
    plain = vllm.texts(100, drafted=False, temperature=1.0, ignore_eos=True)
    assert preempted
    preempted.clear()
    assert vllm.texts(100, drafted=True, temperature=1.0, ignore_eos=True) == plain
    assert preempted


def test_a_request_with_an_adapter_is_drafted_for_from_the_base(vllm: Vllm, adapter: Path) -> None:
    from vllm.lora.request import LoRARequest

    base = vllm.texts(40, drafted=False, temperature=1.0, prompts=3)
    vllm.adapter = LoRARequest("tuned", 1, str(adapter))
    try:
        plain = vllm.texts(40, drafted=False, temperature=1.0, prompts=3)
        before = vllm.drafts.counts.drafted
        assert vllm.texts(40, drafted=True, temperature=1.0, prompts=3) == plain
    finally:
        vllm.adapter = None
    assert plain != base
    assert vllm.drafts.counts.drafted > before
