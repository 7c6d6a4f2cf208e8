"""The head of a model, and the choice of tokens from its logits: recorded for each number of rows that want logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.devices import Runtime
from outrider.engine.gpu.passes.cuda_graphs import Replay
from outrider.engine.gpu.passes.input_buffers import NO_OUTPUTS, InputBuffers, OutputInputs, Outputs
from outrider.engine.gpu.passes.packing import OUTPUTS, round_up
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.penalties import PenaltyBuffers
from outrider.engine.gpu.sampling.restrictions import OUTPUTS as RESTRICTED
from outrider.engine.gpu.sampling.restrictions import TOP, RestrictionBuffers, choose_restricted, likeliest
from outrider.engine.gpu.sampling.sampling import noise_steps

VERIFIED = 2  # candidates of a row for a verifier: the token, and the next best for the gap between the two

Terms = Literal[
    "none", "restrictions", "penalties"
]  # the most that the choice of a row depends on; penalties have both


@dataclass(frozen=True, slots=True)
class Head:
    """The recorded head and choice, for one number of outputs and of candidates."""

    logits: Tensor  # [outputs, vocabulary] float32
    choices: Tensor | None  # [outputs, 2 * candidates] float64: tokens, then their scores
    likeliest: Tensor | None  # see `likeliest`
    replays: list[Replay]

    def replay(self) -> None:
        """Compute them."""
        for replay in self.replays:
            replay()


class TokenChoice:
    """Computes logits, and chooses tokens where there are draws. In a group of ranks only rank 0 has the logits."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        *,
        parts: Callable[[OutputInputs[Tensor]], Tensor],
        inputs: InputBuffers,
        runtime: Runtime,
    ) -> None:
        """`parts`: returns the logits of the rows that want them, of this rank's ids, in parts that are to be added."""
        device = runtime.device
        self._vocabulary = config.vocabulary
        self._unpadded = config.unpadded_vocabulary or config.vocabulary
        self._parts = parts
        self._inputs = inputs
        self._runtime = runtime
        self._leads = runtime.group.shard.rank == 0
        self.logits = torch.zeros(OUTPUTS[-1] if self._leads else 0, config.vocabulary, device=device)
        self._restrictions = RestrictionBuffers(device)
        self._penalties = PenaltyBuffers(slots if self._leads else 0, RESTRICTED, config.vocabulary, device)
        self.heads: dict[tuple[int, int, Terms], Head] = {}  # by outputs, candidates, and what the choice depends on
        self._gathers: dict[int, Replay] = {}  # by outputs, in a group of ranks

    def record(self, count: int, candidates: int) -> None:
        """Record what a pass with `count` outputs may need."""
        self._head_of(count, candidates, "none")
        if candidates and count <= RESTRICTED:
            self._head_of(count, candidates, "restrictions")
            if candidates == VERIFIED:
                self._head_of(count, candidates, "penalties")

    def head(self, outputs: Outputs, candidates: int) -> Head | None:
        """Return the head and the choice for some outputs, if there are any."""
        if not len(outputs.rows):
            return None
        count = round_up(len(outputs.rows), OUTPUTS)
        if not outputs.drawn.any():
            return self._head_of(count, 0, "none")
        return self._head_of(count, candidates, _terms(outputs, candidates))

    def send(self, outputs: Outputs, candidates: int) -> NDArray[np.bool_]:
        """Begin to copy how the choice of some rows is restricted. Return for which of them tokens will be chosen."""
        if not (outputs.restricted and self._leads):
            return outputs.drawn
        fits = self._restrictions.send(outputs.restricted)
        if _terms(outputs, candidates) == "penalties":
            fits &= self._penalties.send(outputs.restricted)
        else:
            fits &= [it is None or it.restriction.history is None for it in outputs.restricted]
        return outputs.drawn & fits

    def compute(
        self, head: Head, outputs: Outputs, chosen: NDArray[np.bool_], result: DeviceLogits, *, last: bool
    ) -> None:
        """Compute logits and choices. `last`: nothing of this call overwrites them."""
        head.replay()
        if not self._leads:
            return
        logits, choices, likely = head.logits, head.choices, head.likeliest
        if not last:
            logits = logits.clone()
            choices, likely = (None if it is None else it.clone() for it in (choices, likely))
        wanted = [None if it is None else it.restriction.logprobs for it in outputs.restricted]
        result.add(outputs.places, chosen, logits, choices, likely, wanted)

    def _head_of(self, count: int, candidates: int, terms: Terms) -> Head:
        """Return the head and the choice at a number of outputs, recorded at their first use."""
        if (count, candidates, terms) not in self.heads:
            self.heads[count, candidates, terms] = self._recorded(count, candidates, terms)
        return self.heads[count, candidates, terms]

    def _recorded(self, count: int, candidates: int, terms: Terms) -> Head:
        inputs, logits = self._inputs.outputs(count), self.logits[:count]
        choices = likely = None
        if candidates:
            choices = torch.zeros(count, 2 * candidates, dtype=torch.float64, device=self._runtime.device)
        if terms != "none" and candidates == VERIFIED:
            likely = torch.zeros(count, 2 + 2 * TOP, dtype=torch.float64, device=self._runtime.device)
        penalties = self._penalties.inputs(count) if terms == "penalties" else None
        self._inputs.send_outputs(NO_OUTPUTS)

        def choose(parts: Tensor) -> None:
            keys, temperatures = inputs.keys, inputs.temperatures
            freely = choices if terms == "none" else None
            self._runtime.kernels.choose(parts, logits, keys, temperatures, self._unpadded, freely)
            if terms != "none" and choices is not None:
                steps = noise_steps(self._vocabulary, self._runtime.device)
                given = self._restrictions.inputs(count)
                choices.copy_(choose_restricted(logits, keys, temperatures, given, steps, candidates, penalties))
                if likely is not None:
                    likely.copy_(likeliest(logits, choices[:, 0].long()))

        if self._runtime.group.shard.of == 1:
            return Head(logits, choices, likely, [self._runtime.record(lambda: choose(self._parts(inputs)))])
        replays = [self._gathering(count, inputs, logits)]  # all ranks record the sum, rank 0 alone what it chooses
        if self._leads:
            replays.append(self._runtime.record(lambda: choose(logits)))
        return Head(logits, choices, likely, replays)

    def _gathering(self, count: int, inputs: OutputInputs[Tensor], logits: Tensor) -> Replay:
        """Return what brings the logits of all ranks to rank 0, recorded at its first use."""

        def gather() -> None:
            parts = self._parts(inputs)
            gathered = self._runtime.group.gather(parts.view(-1, count, parts.shape[1]).sum(0))
            if gathered is not None:
                logits.copy_(gathered[:, : self._vocabulary])

        if count not in self._gathers:
            self._gathers[count] = self._runtime.record(gather)
        return self._gathers[count]


def _terms(outputs: Outputs, candidates: int) -> Terms:
    """Return what the choice of some rows depends on. Penalties are for verifiers alone."""
    if not outputs.restricted:
        return "none"
    penalizes = any(it is not None and it.restriction.history is not None for it in outputs.restricted)
    return "penalties" if penalizes and candidates == VERIFIED else "restrictions"
