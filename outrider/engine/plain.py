"""Models of `transformers` that cannot take back what they have read: served without speculation.

Their state is theirs alone: recurrent, or attention that goes by cache row. Each slot keeps the model's own cache
object, which only grows; a session begins at its first token or where the slot's state ends.
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

from outrider.engine.batch import Segment
from outrider.engine.engine import Engine
from outrider.engine.group import ALONE, RankLost, TensorGroup
from outrider.engine.hugging_face import traits_of
from outrider.engine.pretrained import Pretrained, plain_tensor
from outrider.engine.threads import Threads

STATES = ("past_key_values", "cache_params", "state")  # what models call what they keep

# How a model reads on: any number of tokens at once; after the first time one by one; or all of the text again, where
# it gives nothing to keep.
Reading = Literal["chunks", "one by one", "anew"]


@dataclass(slots=True)
class _Held:
    """What a slot holds."""

    tokens: list[int] = field(default_factory=list)  # that were read
    state: Any = None  # the model's own object


class PlainEngine(Engine):
    """One rank's part of a model, or all of it: a model call for each segment, in order.

    Takes chains only, behind prefix 0 or exactly behind what the slot holds. The logits are on rank 0 alone.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        reason: str,
        reading: Reading = "chunks",
        slots: int,
        rows: int,
        threads: int,
        group: TensorGroup = ALONE,
    ) -> None:
        """`reason`: why it can take no trees."""
        pretrained.attend_by(pretrained.attention)
        self._pretrained = pretrained
        self._reading = reading
        self._threads = Threads(threads)
        self._group = group
        self._held = [_Held() for _ in range(slots)]
        self._state = next((name for name in STATES if name in pretrained.inputs), None)
        super().__init__(traits_of(pretrained, slots=slots, rows=rows, treeless=reason))

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        """As the interface says; raises ValueError, too, for a tree, and where a slot would have to be rewound."""
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
        """Does nothing but check: without trees there is nothing to move."""
        self.check_move(slot, source, destination)
        if not np.array_equal(source, destination):
            raise ValueError(f"cannot move rows of slot {slot}: {self.treeless}")

    def copy(self, source: int, target: int, rows: int) -> None:
        """As the interface says; raises ValueError for a part of what the slot holds."""
        self.check_copy(source, target, rows)
        if rows not in (0, len(self._held[source].tokens)):
            raise ValueError(f"cannot copy {rows} rows of slot {source}: {self.treeless}")
        with torch.inference_mode():
            self._held[target] = deepcopy(self._held[source]) if rows else _Held()

    def _read(self, segment: Segment) -> Tensor:
        """Reads a segment's tokens: the logits that it wants."""
        held = self._held[segment.slot]
        if not segment.prefix:
            held = self._held[segment.slot] = _Held()
        tokens = [int(token) for token in segment.tokens]
        before = len(held.tokens)
        held.tokens += tokens
        if self._reading == "anew":
            said = self._pretrained.logits(held.tokens)[before:]
        elif self._reading == "one by one" and before:
            said = torch.cat([self._append(held, [token]) for token in tokens])
        else:
            said = self._append(held, tokens)
        return said[len(said) - segment.outputs :]

    def _append(self, held: _Held, tokens: list[int]) -> Tensor:
        """What the model says after each of them: [tokens, vocabulary]."""
        assert self._state is not None
        said = self._pretrained.model(
            input_ids=torch.tensor([tokens]),
            use_cache=True,
            **({} if held.state is None else {self._state: held.state}),
        )
        held.state = getattr(said, self._state)
        return plain_tensor(said.logits)[0, :, : self.vocabulary].float()
