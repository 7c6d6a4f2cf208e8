"""gpt-fast as a peer, from its checkout: its model with a Hugging Face checkpoint, decoding like its `generate.py`."""

from __future__ import annotations

import inspect
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.rows.requests import BenchRequest
from outrider.cli.performance.samples import Sample
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config
from outrider.engine.torch_layers.weights import WeightSource
from outrider.errors import ConfigError

CONTEXT = 1024  # the reference models'
WARM_UP = 8  # steps


def load(checkout: Path, target: Path, dtype: str, threads: int) -> Callable[[BenchRequest], Sample]:
    """Return a function that generates. With a C++ compiler it is compiled, which makes its first call slow.

    Raises ConfigError for a target with a shape that gpt-fast does not support.
    """
    torch.set_num_threads(threads)
    sys.path.insert(0, str(checkout))
    import model as gpt_fast  # type: ignore[import-not-found]

    with torch.inference_mode(), torch.device("meta"):
        transformer = gpt_fast.Transformer(_arguments(gpt_fast, read_config(target)))
    state = _state(Weights(target), read_config(target), dtype)
    transformer.load_state_dict(state, assign=True, strict=True)
    transformer.eval()
    with torch.inference_mode():
        transformer.setup_caches(max_batch_size=1, max_seq_length=CONTEXT)
    decode: Any = _decode
    if shutil.which("g++"):
        decode = torch.compile(_decode, fullgraph=True)

    def generate(request: BenchRequest) -> Sample:
        torch.manual_seed(request.seed)
        began = time.perf_counter()
        tokens: list[int] = []
        arrivals: list[float] = []
        with torch.inference_mode():
            position = torch.arange(len(request.prompt))
            token = _choose(transformer(torch.tensor([request.prompt]), position)[0, -1], request.temperature)
            position = position[-1:] + 1
            while True:
                tokens.append(int(token))
                arrivals.append(time.perf_counter() - began)
                if len(tokens) == request.max_tokens:
                    return Sample(tuple(tokens), tuple(arrivals), len(tokens))
                token = decode(transformer, token.view(1, 1).clone(), position, request.temperature)
                position = position + 1

    return generate


def step_seconds(
    checkout: Path,
    source: WeightSource,
    config: ModelConfig,
    *,
    device: str,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    steps: int,
    compiled: bool,
) -> float:
    """Return the median time of a greedy step over several prompts of one length, as `generate.py` does it on CUDA.

    Raises ConfigError for a model or a checkout that is not supported.
    """
    sys.path.insert(0, str(checkout))
    import model as gpt_fast

    if [*inspect.signature(gpt_fast.Transformer.forward).parameters] != ["self", "idx", "input_pos"]:
        raise ConfigError(f"gpt-fast: {checkout} is newer than what is known here; take one whose model makes its mask")
    with torch.inference_mode(), torch.device("meta"):
        transformer = gpt_fast.Transformer(_arguments(gpt_fast, config))
    transformer.load_state_dict(_state(source, config, dtype), assign=True, strict=True)
    transformer.to(device).eval()
    with torch.inference_mode(), torch.device(device):
        transformer.setup_caches(max_batch_size=len(prompts), max_seq_length=CONTEXT)
        decode: Any = _decode_all
        if compiled:
            torch._inductor.config.coordinate_descent_tuning = True
            decode = torch.compile(_decode_all, mode="reduce-overhead", fullgraph=True)
        position = torch.arange(len(prompts[0]))
        tokens = _greedy(transformer(torch.tensor([*prompts]), position))
        position = position[-1:] + 1
        times = []
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            tokens = decode(transformer, tokens.clone(), position)
            tokens.tolist()  # as for streaming
            times.append(time.perf_counter() - began)
            position = position + 1
    return median(times[WARM_UP:])


def _greedy(logits: Tensor) -> Tensor:
    return logits[:, -1].argmax(-1, keepdim=True)


def _decode_all(transformer: Any, tokens: Tensor, position: Tensor) -> Tensor:
    return _greedy(transformer(tokens, position))


def _decode(transformer: Any, token: Tensor, position: Tensor, temperature: float) -> Tensor:
    return _choose(transformer(token, position)[0, -1], temperature)


def _choose(logits: Tensor, temperature: float) -> Tensor:
    """Return one token, [1]: greedy, or sampled without a synchronization as gpt-fast does it."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    probabilities = torch.softmax(logits.float() / temperature, -1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1.0)).argmax(-1, keepdim=True)


def _arguments(gpt_fast: Any, config: ModelConfig) -> Any:
    if config.head_dim * config.heads != config.width or config.qkv_bias or config.ffn_bias or config.head_norms:
        raise ConfigError("gpt-fast: the target has a shape that it does not know; pad it to 100M or more")
    return gpt_fast.ModelArgs(
        block_size=CONTEXT,
        vocab_size=config.vocabulary,
        n_layer=config.layers,
        n_head=config.heads,
        n_local_heads=config.kv_heads,
        dim=config.width,
        intermediate_size=config.ffn,
        norm_eps=config.eps,
        rope_base=config.rope.theta,
    )


def _state(source: WeightSource, config: ModelConfig, dtype: str) -> dict[str, Tensor]:
    """Return the checkpoint's tensors with gpt-fast's names, as its `convert_hf_checkpoint.py` makes them."""
    width, dim, ffn = config.width, config.head_dim, config.ffn
    state = {}

    def take(name: str, *shape: int) -> Tensor:
        return source.take(name, *shape).to(getattr(torch, dtype))

    def turned(name: str, heads: int) -> Tensor:
        """Reorder rows: gpt-fast's rotary embedding pairs neighbouring channels, Hugging Face's halves of a head."""
        rows = take(name, heads * dim, width)
        return rows.view(heads, 2, dim // 2, width).transpose(1, 2).reshape(heads * dim, width)

    embedding = take("model.embed_tokens.weight", config.vocabulary, width)
    state["tok_embeddings.weight"] = embedding
    state["output.weight"] = embedding if config.tied else take("lm_head.weight", config.vocabulary, width)
    state["norm.weight"] = take("model.norm.weight", width)
    for index in range(config.layers):
        old, new = f"model.layers.{index}", f"layers.{index}"
        attention, mlp = f"{old}.self_attn", f"{old}.mlp"
        query = turned(f"{attention}.q_proj.weight", config.heads)
        key = turned(f"{attention}.k_proj.weight", config.kv_heads)
        value = take(f"{attention}.v_proj.weight", config.kv_heads * dim, width)
        state[f"{new}.attention.wqkv.weight"] = torch.cat([query, key, value])
        state[f"{new}.attention.wo.weight"] = take(f"{attention}.o_proj.weight", width, config.heads * dim)
        state[f"{new}.feed_forward.w1.weight"] = take(f"{mlp}.gate_proj.weight", ffn, width)
        state[f"{new}.feed_forward.w3.weight"] = take(f"{mlp}.up_proj.weight", ffn, width)
        state[f"{new}.feed_forward.w2.weight"] = take(f"{mlp}.down_proj.weight", width, ffn)
        state[f"{new}.attention_norm.weight"] = take(f"{old}.input_layernorm.weight", width)
        state[f"{new}.ffn_norm.weight"] = take(f"{old}.post_attention_layernorm.weight", width)
    return state
