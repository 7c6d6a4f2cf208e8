"""Shared noise in vLLM's sampler: the token at a position is argmax(log p + g), with drafts and without.

g is Gumbel noise that drafters compute alike from (seed, position, token), so the distribution is vLLM's own, and a
draft is right far more often than by rejection sampling. A request's text does not depend on what was drafted. See
docs/decisions/0001-shared-noise.md, and Daliri et al., arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from outrider.core.sampling.noise import noise_key
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import FILLING, Contract
from outrider.engine.gpu.sampling.sampling import noise_steps, scores, signed

Draw = Callable[[Tensor, dict[int, Any], Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
Verification = Callable[..., Tensor]

ROWS = 16  # of which a device computes the noise at once: eight bytes for each token


class Noise:
    """The shared noise of one request."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed = seed
        self._vocabulary = vocabulary
        self._length = 0
        self._sampler = self._fresh()

    def choose(self, logits: Tensor, length: int, ahead: int) -> int:
        """Return the token at the position `length` + `ahead`, from a row of logits that are filtered and divided by
        the temperature: [vocabulary] float32 of the processor. `length` does not fall from call to call.
        """
        if length < self._length:
            self._sampler, self._length = self._fresh(), 0
        self._sampler.extend([0] * (length - self._length))
        self._length = length
        return self._sampler.choose(logits.numpy(), [0] * ahead).token

    def _fresh(self) -> Sampler:
        # Tokens matter to penalties alone, which vLLM has applied.
        return Sampler(Contract(seed=self.seed, max_tokens=FILLING), self._vocabulary, [], 0)


class NoisyRow(NamedTuple):
    """A row of a step's batch that draws by shared noise."""

    row: int
    noise: Noise
    length: int  # tokens of its text before the step's first new one
    drafts: int  # that the step verifies


class SharedNoise:
    """Draws the tokens of some rows in vLLM's sampler, in its V1 runner. All others it leaves to vLLM."""

    def __init__(self, sampler: Any, rows: Callable[[], Sequence[NoisyRow]]) -> None:
        """Take the place of `sampler`'s last part, and of the verification of drafts. `rows`: those of the step."""
        self._rows = rows
        self._own_draw: Draw = sampler.topk_topp_sampler.forward
        self._own_verification: Verification = rejection_sampler.rejection_sample
        self._processed = sampler.logprobs_mode.startswith("processed")
        sampler.topk_topp_sampler.forward = self._draw
        rejection_sampler.rejection_sample = self._verify

    def _draw(
        self, logits: Tensor, generators: dict[int, Any], top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the last token of each row: [rows, vocabulary] logits, divided by the temperature."""
        rows = self._rows()
        if not rows:
            return self._own_draw(logits, generators, top_k, top_p)
        logits = apply_top_k_top_p(logits, top_k, top_p)
        chosen = choose(logits, [(it.row, it.noise, it.length, it.drafts) for it in rows])
        if len(rows) == len(logits) and not self._processed:
            return chosen, None
        drawn, shown = self._own_draw(logits, generators, None, None)
        return drawn.index_copy(0, _index([it.row for it in rows], drawn), chosen.to(drawn.dtype)), shown

    def _verify(
        self,
        drafts: Tensor,
        counts: list[int],
        longest: int,
        ends: Tensor,
        draft_probs: Tensor | None,
        logits: Tensor,
        last: Tensor,
        sampling: Any,
        **more: Any,
    ) -> Tensor:
        """Verify drafts: a row with noise accepts those that are its own choices, as vLLM does for greedy rows.

        The arguments are those of vLLM's `rejection_sample`; `logits`: [drafts, vocabulary], filtered and divided by
        the temperature.
        """
        rows = [it for it in self._rows() if it.drafts]
        if not rows:
            return self._own_verification(drafts, counts, longest, ends, draft_probs, logits, last, sampling, **more)
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        asked = [(starts[it.row] + ahead, it.noise, it.length, ahead) for it in rows for ahead in range(it.drafts)]
        chosen = choose(logits, asked)
        index = _index([place for place, *_ in asked], logits)
        logits = logits.index_fill(0, index, 0.0)
        logits[index, chosen] = 1.0
        temperature = sampling.temperature.index_fill(0, _index([it.row for it in rows], logits), 0.0)
        greedy = replace(
            sampling, temperature=temperature, all_random=False, all_greedy=not bool(temperature.count_nonzero())
        )
        return self._own_verification(drafts, counts, longest, ends, draft_probs, logits, last, greedy, **more)


def choose(logits: Tensor, asked: Sequence[tuple[int, Noise, int, int]]) -> Tensor:
    """Return the tokens at some places: [asked]. `asked`: rows of the logits, each with what `Noise.choose` needs."""
    if logits.device.type == "cpu":
        rows = logits.float()
        return torch.tensor([noise.choose(rows[place], length, ahead) for place, noise, length, ahead in asked])
    steps, found = noise_steps(logits.shape[-1], logits.device), []
    for first in range(0, len(asked), ROWS):
        some = asked[first : first + ROWS]
        keys = torch.tensor([signed(noise_key(noise.seed, 0, length + ahead)) for _, noise, length, ahead in some])
        places, keys = _index([place for place, *_ in some], logits), keys.to(logits.device)
        found.append(scores(logits[places], keys, torch.ones_like(keys, dtype=torch.float64), steps).argmax(-1))
    return torch.cat(found)


def _index(places: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(places, device=like.device)
