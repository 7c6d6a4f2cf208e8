"""What `transformers` says, as the judge of a cluster: the same checkpoint, float32, its own modules."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cli.compare import Difference
from outrider.core.acceptance import choose
from outrider.core.contract import Contract
from outrider.core.noise import NoiseRows
from outrider.errors import CheckpointError, ConfigError


class Reference:
    """A checkpoint in `transformers`. One call at a time.

    Raises ConfigError when `transformers` is not installed, CheckpointError when it cannot load the folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of transformers, about itself
                import torch
                from transformers import AutoModelForCausalLM
                from transformers.utils import logging
        except ImportError:
            raise ConfigError("transformers is not installed: `pip install transformers`, or --no-reference") from None
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from None
        self._torch = torch
        self._model = model.eval()

    def difference(
        self, prompt: Sequence[int], said: Sequence[int], gaps: Sequence[float], contract: Contract
    ) -> Difference | None:
        """The first token of an answer that is not what `transformers` chooses after the same text; None: all are.

        One pass over prompt and answer gives the logits at all positions, so one difference does not hide another
        text; only the first one is reported, as for two texts.
        """
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([[*prompt, *said]])).logits[0].numpy().astype(np.float32)
        noise = NoiseRows.of(contract, logits.shape[1])
        for index, token in enumerate(said):
            position = len(prompt) + index
            choice = choose(logits[position - 1], contract, noise.row(position))
            noise.forget_below(position)
            if choice.token != token:
                return Difference(index, token, choice.token, min(choice.gap, gaps[index]))
        return None
