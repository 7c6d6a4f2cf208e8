"""The reference that a cluster is compared with: the same checkpoint in `transformers`, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.cli.verification.compare import Difference, Verdict
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.checkpoints.checkpoint import read_eos_ids, tokenizer_source
from outrider.engine.transformers.quiet import quiet
from outrider.errors import CheckpointError, ConfigError
from outrider.grammar.compiler import GrammarCompiler


class Reference:
    """A checkpoint in `transformers`, which must be installed. Calls must not overlap; `threads` run its operations.

    With an `adapter`, a folder in PEFT's format, the checkpoint with that adapter; PEFT must be installed then.

    Raises CheckpointError when `transformers` or PEFT cannot load a folder, and ConfigError without PEFT.
    """

    def __init__(self, checkpoint: Path, *, adapter: Path | None = None, threads: int = 1) -> None:
        with quiet():
            import torch
            from transformers.utils import logging

            from outrider.engine.transformers.pretrained import from_pretrained

            logging.disable_progress_bar()
            try:
                model: Any = from_pretrained(checkpoint, dtype=torch.float32)
            except Exception as error:  # the errors of a bad folder have no common base class
                raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from None
            if adapter is not None:
                model = _adapted(model, adapter)
        self._torch = torch
        self._threads = threads
        self._model = model.eval()
        self._vocabulary: int = model.config.vocab_size
        self._eos_ids = read_eos_ids(checkpoint)
        self._grammars = GrammarCompiler(tokenizer_source(checkpoint), self._vocabulary, self._eos_ids)

    def difference(
        self, prompt: Sequence[int], answer: Sequence[int], contract: Contract, tolerance: float
    ) -> Difference | None:
        """Return where an answer differs from the tokens that `transformers` chooses after the same prefixes.

        This is the first bug, else the first near tie, else None. One pass over prompt and answer gives the logits of
        all positions, so positions after a near tie are compared, too. The gap is the lead of the reference's token
        over the answer's token.
        """
        sampler = self._sampler(contract, prompt)
        found: Difference | None = None
        for index, (token, logits) in enumerate(zip(answer, self.logits(prompt, answer), strict=True)):
            scores = sampler.scores(logits)
            choice = int(scores.argmax())
            if choice != token:
                lead = float(scores[choice] - scores[token]) if 0 <= token < len(scores) else math.inf
                difference = Difference(index, token, choice, lead)
                if difference.judged(tolerance) is Verdict.BUG:
                    return difference
                found = found or difference
            sampler.extend([token])
        return found

    def quantiles(
        self, prompt: Sequence[int], answer: Sequence[int], contract: Contract, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Return the quantile of each token of an answer in the distribution of `transformers`: [answer].

        Tokens are ordered by falling probability. A token's quantile is the probability of all tokens before it, plus a
        random share of its own probability.

        If the tokens are drawn from these probabilities, the quantiles are uniform and independent (Rosenblatt 1952;
        randomized for discrete distributions by Brockwell 2007). NaN for a token with probability 0.
        """
        sampler = self._sampler(contract, prompt)
        found = np.full(len(answer), np.nan)
        for index, (token, logits) in enumerate(zip(answer, self.logits(prompt, answer), strict=True)):
            p = sampler.probabilities(logits)
            if 0 <= token < len(p) and p[token] > 0.0:
                before = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
                found[index] = before + generator.random() * p[token]
            sampler.extend([token])
        return found

    def _sampler(self, contract: Contract, prompt: Sequence[int]) -> Sampler:
        """Return what chooses the answer's tokens. An answer with a grammar may end where that allows it."""
        if contract.grammar is None:
            return Sampler(contract, self._vocabulary, prompt, len(prompt))
        state = self._grammars.start(contract.grammar)
        contract = replace(contract, stop_ids=self._eos_ids)
        return Sampler(contract, self._vocabulary, prompt, len(prompt), grammar=state)

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits from which each token of the answer was chosen: [answer, vocabulary]."""
        if not answer:
            return np.empty((0, self._vocabulary), np.float32)
        self._torch.set_num_threads(self._threads)
        known = [token if 0 <= token < self._vocabulary else 0 for token in (*prompt, *answer[:-1])]
        with self._torch.inference_mode():
            text = self._torch.tensor([known])
            logits: NDArray[np.float32] = self._model(text, logits_to_keep=len(answer)).logits[0].numpy()
        return logits


def _adapted(model: Any, adapter: Path) -> Any:
    """Return a model of transformers with a low-rank adapter."""
    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigError("flags: adapter: is compared by PEFT, which is not installed: pip install peft") from None
    try:
        return PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # the errors of a bad folder have no common base class
        raise CheckpointError(f"{adapter}: PEFT cannot load it: {error}") from None
