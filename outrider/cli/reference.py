"""What `transformers` says, as the judge of a cluster: the same checkpoint, float32, its own modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.cli.compare import Difference, Verdict
from outrider.core.contract import Contract
from outrider.core.sampler import Sampler
from outrider.engine.quiet import quiet
from outrider.errors import CheckpointError


class Reference:
    """A checkpoint in `transformers`, which must be installed. One call at a time; `threads` for its operations.

    Raises CheckpointError when `transformers` cannot load the folder.
    """

    def __init__(self, checkpoint: Path, *, threads: int = 1) -> None:
        with quiet():
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            try:
                model: Any = AutoModelForCausalLM.from_pretrained(
                    checkpoint, dtype=torch.float32, local_files_only=True
                )
            except Exception as error:  # what can be wrong with a folder has no common base
                raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from None
        self._torch = torch
        self._threads = threads
        self._model = model.eval()
        self._vocabulary: int = model.config.vocab_size

    def difference(
        self, prompt: Sequence[int], said: Sequence[int], contract: Contract, tolerance: float
    ) -> Difference | None:
        """Where an answer is not what `transformers` chooses after the same text: the first bug, else the first near
        tie; None: nowhere.

        One pass over prompt and answer gives the logits at all positions, so a near tie leaves the rest to be judged.
        The gap is the lead of the reference's token over the one that was said: what rounding had to make up for.
        """
        sampler = Sampler(contract, self._vocabulary, prompt, len(prompt))
        found: Difference | None = None
        for index, (token, logits) in enumerate(zip(said, self._logits(prompt, said), strict=True)):
            scores = sampler.scores(logits)
            choice = int(scores.argmax())
            if choice != token:
                lead = float(scores[choice] - scores[token]) if 0 <= token < len(scores) else math.inf
                parted = Difference(index, token, choice, lead)
                if parted.judged(tolerance) is Verdict.BUG:
                    return parted
                found = found or parted
            sampler.extend([token])
        return found

    def places(
        self, prompt: Sequence[int], said: Sequence[int], contract: Contract, dice: np.random.Generator
    ) -> NDArray[np.float64]:
        """Where each token of an answer stands in what `transformers` gives to the same text, likelier tokens first:
        the probability of all that is before it, and of its own a share that the dice decide. [answer]

        Tokens that are drawn from these very probabilities have places that are uniform and independent (Rosenblatt
        1952; randomized for discrete laws by Brockwell 2007). NaN for a token that may not be said at all.
        """
        sampler = Sampler(contract, self._vocabulary, prompt, len(prompt))
        found = np.full(len(said), np.nan)
        for index, (token, logits) in enumerate(zip(said, self._logits(prompt, said), strict=True)):
            p = sampler.probabilities(logits)
            if 0 <= token < len(p) and p[token] > 0.0:
                before = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
                found[index] = before + dice.random() * p[token]
            sampler.extend([token])
        return found

    def _logits(self, prompt: Sequence[int], said: Sequence[int]) -> NDArray[np.float32]:
        """For each token of the answer, what it was chosen from: [answer, vocabulary]."""
        if not said:
            return np.empty((0, self._vocabulary), np.float32)
        self._torch.set_num_threads(self._threads)
        known = [token if 0 <= token < self._vocabulary else 0 for token in (*prompt, *said[:-1])]
        with self._torch.inference_mode():
            text = self._torch.tensor([known])
            logits: NDArray[np.float32] = self._model(text, logits_to_keep=len(said)).logits[0].numpy()
        return logits
