"""EAGLE heads on a device: one layer over a token's embedding and the state of the row before it.

It is an engine as for a whole model: recorded passes over KV in pages, tokens chosen on the device, levels that the
device grows by itself. What differs is the input: a row continues features of the target, or what its parent's row has
computed (`RowStates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.gpu.devices import kernels_for
from outrider.engine.gpu.eagle.eagle_layers import EagleLayers
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.engine import DeviceEngine
from outrider.engine.gpu.passes.cuda_graphs import Recorder
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.interface.batch import Segment
from outrider.engine.tensor_parallel.group import ALONE


class DeviceEagle(DeviceEngine):
    """An engine over EAGLE heads on a device.

    A pass that continues a text drops the nodes behind it, so rows are never moved.
    """

    def __init__(
        self,
        model: EagleModel,
        digest: bytes,
        *,
        device: torch.device,
        slots: int,
        rows: int,
        pages: int,
        recorder: Recorder,
        window: int | None = None,
    ) -> None:
        """`digest`: of the target's tokenizer; `window`: rows of each text whose features are kept, the latest; None:
        of all rows.
        """
        self.states = RowStates(slots, window or rows, model.config.width, model.weights.embedding.dtype, device)
        super().__init__(
            model.config,
            model.weights,
            digest,
            device=device,
            slots=slots,
            rows=rows,
            pages=pages,
            group=ALONE,
            kernels=kernels_for(device),
            recorder=recorder,
            states=self.states,
            make_layers=partial(EagleLayers, model.network, self.states),
        )
        self.begins_next_pass = False

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def _base(self, slot: int) -> int:
        """Return the text's row that row 0 of the slot is."""
        return 0

    def _send_states(self, segments: Sequence[Segment]) -> None:
        self.states.send(segments, [self._base(it.slot) for it in segments])
