"""What the drafter itself says, for it to be judged: training on its own mistakes, as it will make them when it drafts.

Sources: Agarwal et al., "On-policy distillation of language models" (GKD, arXiv 2306.13649); Zhou et al., "DistillSpec"
(arXiv 2310.08461), section 4, which finds it best for speculative decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continued(model: Any, prompts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Texts of one length, each with `count` tokens more, which the model draws at temperature 1.

    `prompts`: [rows, length]; the generator is on their device. Returns [rows, length + count].
    """
    training = model.training
    model.eval()
    try:
        given, text, cache = prompts, [prompts], None
        for _ in range(count):
            said = model(input_ids=given, past_key_values=cache, use_cache=True)
            cache = said.past_key_values
            given = torch.multinomial(said.logits[:, -1].float().softmax(-1), 1, generator=generator)
            text.append(given)
        return torch.cat(text, 1)
    finally:
        model.train(training)


def is_own(step: int, share: float) -> bool:
    """Whether the drafter goes on with the text itself in a step, so that it does in that share of them, evenly."""
    return int((step + 1) * share) > int(step * share)
