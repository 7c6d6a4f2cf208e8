"""What vLLM 0.32 leaves out, or has wrong, where it verifies drafts, whoever drafts: put right while it runs.

It refuses `min_p` and `logit_bias` with drafts, because these filters know nothing of them; here they do. On
processors, values of requests are read from memory that nobody wrote (its issue 55005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

PROPOSER = "outrider_vllm.RemoteDrafter"


def accept_filters() -> None:
    """Have vLLM take requests with these filters where this package drafts. It calls this in each of its processes."""
    refuse = SamplingParams._validate_spec_decode

    def validate(params: SamplingParams, speculation: Any) -> None:
        if speculation is None or speculation.model != PROPOSER:
            refuse(params, speculation)

    SamplingParams._validate_spec_decode = validate


def repair() -> None:
    """Put right what is wrong on processors."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = _apply_sampling_constraints


def complete(runner: Any) -> None:
    """Have a runner filter drafts by `min_p` and `logit_bias`. It has no request yet."""
    processors: LogitsProcessors = runner.input_batch.logitsprocs
    config, device = runner.vllm_config, runner.device
    processors.argmax_invariant.append(MinPLogitsProcessor(config, device, PIN_MEMORY))
    processors.non_argmax_invariant.append(LogitBiasLogitsProcessor(config, device, PIN_MEMORY))
    apply: Callable[..., Tensor] = runner.rejection_sampler.apply_logits_processors

    def apply_logits_processors(logits: Tensor, sampling: Any, metadata: Any) -> Tensor:
        for row, biases in _of(sampling, LogitBiasLogitsProcessor, "biases"):
            end = sum(metadata.num_draft_tokens[: row + 1])
            tokens = torch.tensor([*biases], device=logits.device)
            values = torch.tensor([*biases.values()], dtype=logits.dtype, device=logits.device)
            logits[end - metadata.num_draft_tokens[row] : end, tokens] += values
        return apply(logits, sampling, metadata)

    runner.rejection_sampler.apply_logits_processors = apply_logits_processors


def _of(sampling: Any, kind: type, state: str) -> Iterator[tuple[int, Any]]:
    """Yield what a processor of this kind keeps for rows of the batch."""
    for processor in sampling.logitsprocs.all:
        if isinstance(processor, kind):
            yield from getattr(processor, state).items()


def _apply_sampling_constraints(logits: Tensor, ends: Tensor, sampling: Any) -> Tensor:
    """Divide logits of drafts by the temperature, and filter them: [drafts, vocabulary]. `ends`: [requests] running
    total of drafts. The order is that of vLLM's sampler.
    """
    count = len(logits)
    if sampling.all_greedy or not count:  # without drafts vLLM's own function ends the server, if a request has `top_k`
        return logits
    expand = rejection_sampler.expand_batch_to_tokens
    logits.div_(expand(sampling.temperature, ends, count, replace_from=0, replace_to=1).unsqueeze(-1))
    for processor in sampling.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            shares = expand(processor.min_p.flatten(), ends, count).unsqueeze(-1)
            probabilities = logits.softmax(dim=-1)
            logits.masked_fill_(probabilities < probabilities.amax(dim=-1, keepdim=True) * shares, -torch.inf)
    limits = (None if it is None else expand(it, ends, count) for it in (sampling.top_k, sampling.top_p))
    filtered: Tensor = apply_top_k_top_p(logits, *limits)
    return filtered


def _expand_batch_to_tokens(
    values: Tensor, ends: Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return each request's value for each of its drafts: [count]. `ends`: [requests] running total of drafts."""
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return torch.repeat_interleave(values, torch.diff(ends, prepend=ends.new_zeros(1)).long(), output_size=count)
