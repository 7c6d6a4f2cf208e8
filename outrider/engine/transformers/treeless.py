"""The engine for models of `transformers` that cannot rewind what they have read: it serves them without speculation.

The state of these models is recurrent, or their attention depends on the cache row. Each slot keeps the model's own
cache object, which only grows; a session begins at its first token or where the slot's state ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.threads import TorchThreads
from outrider.engine.transformers.engine import traits_of
from outrider.engine.transformers.pretrained import Pretrained, plain_tensor

STATES = ("past_key_values", "cache_params", "state")  # names that models have for their state

# How a model continues a text: any number of tokens at once; one by one after the first call; or, where it returns no
# state, all of the text again.
Reading = Literal["chunks", "one by one", "anew"]


@dataclass(slots=True)
class _HeldText:
    """The text and the state of a slot."""

    tokens: list[int] = field(default_factory=list)  # tokens that the model has read
    state: Any = None  # the model's cache object


class TreelessEngine(Engine):
    """A model, or a rank's part of it. A pass is one model call for each segment, in order.

    A segment must be a chain, with prefix 0 or exactly behind the slot's text. Only rank 0 has the logits.
    """

    def __init__(
        self, pretrained: Pretrained, settings: EngineSettings, *, reason: str, reading: Reading = "chunks"
    ) -> None:
        """`reason`: why the model computes no trees."""
        pretrained.set_attention(pretrained.attention)
        self._pretrained = pretrained
        self._reading = reading
        self._threads = TorchThreads(settings.threads or torch.get_num_threads())
        self._group = settings.group
        self._held = [_HeldText() for _ in range(settings.slots)]
        self._state = next((name for name in STATES if name in pretrained.inputs), None)
        super().__init__(traits_of(pretrained, settings, reason))

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        """Run one pass; see `Engine.forward`. Raises ValueError also for a tree, and where a slot had to rewind."""
        self.check_segments(segments)
        for segment in segments:
            if segment.mask is not None and not np.array_equal(segment.mask, np.tri(len(segment.tokens), dtype=bool)):
                raise ValueError(f"segment of slot {segment.slot}: a tree, and this model takes none: {self.treeless}")
            if segment.prefix not in (0, len(self._held[segment.slot].tokens)):
                raise ValueError(
                    f"segment of slot {segment.slot}: prefix {segment.prefix}, and the slot's state ends at "
                    f"{len(self._held[segment.slot].tokens)}"
                )
        self._threads.prepare()
        try:
            with torch.inference_mode():
                logits = torch.cat([self._read(segment) for segment in segments])
        except RuntimeError as error:
            if self._group.shard.of > 1:
                raise RankLost(f"rank {self._group.shard.rank} has lost another one: {error}") from error
            raise
        return np.empty((0, self.vocabulary), np.float32) if self._group.shard.rank else logits.numpy()

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Check the arguments: without trees no row ever moves."""
        self.check_move(slot, source, destination)
        if not np.array_equal(source, destination):
            raise ValueError(f"cannot move rows of slot {slot}: {self.treeless}")

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy a slot; see `Engine.copy`. Raises ValueError for only a part of the slot's text."""
        self.check_copy(source, target, rows)
        if rows not in (0, len(self._held[source].tokens)):
            raise ValueError(f"cannot copy {rows} rows of slot {source}: {self.treeless}")
        with torch.inference_mode():
            self._held[target] = deepcopy(self._held[source]) if rows else _HeldText()

    def _read(self, segment: Segment) -> Tensor:
        """Read a segment's tokens and return its wanted logits."""
        held = self._held[segment.slot]
        if not segment.prefix:
            held = self._held[segment.slot] = _HeldText()
        tokens = [int(token) for token in segment.tokens]
        before = len(held.tokens)
        held.tokens += tokens
        if self._reading == "anew":
            logits = self._pretrained.logits(held.tokens)[before:]
        elif self._reading == "one by one" and before:
            logits = torch.cat([self._append(held, [token]) for token in tokens])
        else:
            logits = self._append(held, tokens)
        return logits[len(logits) - segment.outputs :]

    def _append(self, held: _HeldText, tokens: list[int]) -> Tensor:
        """Read tokens behind a slot's text, and return the logits after each: [tokens, vocabulary]."""
        assert self._state is not None
        result = self._pretrained.model(
            input_ids=torch.tensor([tokens]),
            use_cache=True,
            **({} if held.state is None else {self._state: held.state}),
        )
        held.state = getattr(result, self._state)
        return plain_tensor(result.logits)[0, :, : self.vocabulary].float()
