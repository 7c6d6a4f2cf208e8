"""A head that has some of the ids, in a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from outrider.engine.checkpoints.checkpoint import Weights, read_json
from outrider.engine.checkpoints.model_config import DRAFT_IDS, check_draft_ids
from outrider.errors import CheckpointError

NEVER = -1e4  # the logit of all other ids; losses make no numbers of an infinite one


class ReducedHead(torch.nn.Module):
    """Returns logits of all ids: [..., vocabulary]."""

    ids: Tensor

    def __init__(self, weight: Tensor, ids: Tensor, vocabulary: int) -> None:
        """`weight`: [ids, width], of these ids."""
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("ids", ids, persistent=False)
        self.vocabulary = vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        own = linear(hidden, self.weight)
        return own.new_full((*own.shape[:-1], self.vocabulary), NEVER).index_copy(-1, self.ids, own)


def with_own_head(model: Any, folder: Path) -> Any:
    """Return a model that was loaded without its head, with the head of the checkpoint. Raises CheckpointError."""
    raw, weights = read_json(folder / "config.json"), Weights(folder)
    try:
        ids = check_draft_ids(raw[DRAFT_IDS], model.config.vocab_size, tied=model.config.tie_word_embeddings)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {DRAFT_IDS} must be {error}") from None
    weight = weights.take("lm_head.weight", len(ids), model.config.hidden_size).to(model.dtype)
    model.set_output_embeddings(ReducedHead(weight, torch.tensor(ids), model.config.vocab_size))
    return model
