"""EAGLE heads on a device: one layer over a token's embedding and the state of the row before it.

It is an engine as for a whole model: recorded passes over KV in pages, tokens chosen on the device, levels that the
device grows by itself. What differs is the input: a row continues features of the target, or what its parent's row has
computed (`RowStates`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider.engine.gpu.devices import Runtime
from outrider.engine.gpu.eagle.eagle_layers import EagleLayers
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.engine import DeviceEngine
from outrider.engine.gpu.passes.row_states import RowStates


class DeviceEagle(DeviceEngine):
    """An engine over EAGLE heads on a device.

    A pass that continues a text drops the nodes behind it, so rows are never moved.
    """

    def __init__(
        self,
        model: EagleModel,
        digest: bytes,
        runtime: Runtime,
        *,
        slots: int,
        rows: int,
        pages: int,
        window: int | None = None,
        base: Callable[[int], int] = lambda slot: 0,
    ) -> None:
        """`digest`: of the target's tokenizer; `window`: rows of each text whose features are kept, the latest; None:
        of all rows; `base`: see `RowStates`.
        """
        dtype = model.weights.embedding.dtype
        self.states = RowStates(slots, window or rows, model.config.width, dtype, runtime.device, base)
        super().__init__(
            model.config,
            model.weights,
            digest,
            runtime,
            slots=slots,
            rows=rows,
            pages=pages,
            states=self.states,
            make_layers=partial(EagleLayers, model.network, self.states),
        )
        self.begins_next_pass = False

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        raise NotImplementedError
