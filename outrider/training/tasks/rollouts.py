"""On-policy training data: the drafter continues texts itself, and learns from the target's judgement of its tokens.

Sources: Agarwal et al., "On-policy distillation of language models" (GKD, arXiv 2306.13649); Zhou et al., "DistillSpec"
(arXiv 2310.08461), section 4, which finds it best for speculative decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continued(model: Any, prompts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the prompts with `count` further tokens each, which the model draws at temperature 1.

    `prompts`: [rows, length]; the generator is on their device. Return [rows, length + count].
    """
    training = model.training
    model.eval()
    try:
        given, text, cache = prompts, [prompts], None
        for _ in range(count):
            output = model(input_ids=given, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            given = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=generator)
            text.append(given)
        return torch.cat(text, 1)
    finally:
        model.train(training)


def is_on_policy(step: int, share: float) -> bool:
    """Return whether the drafter itself continues the text in a step. A `share` of all steps does, evenly spread."""
    return int((step + 1) * share) > int(step * share)
