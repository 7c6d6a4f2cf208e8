"""EAGLE heads on a device: one layer over a token's embedding and the state of the row before it.

It is an engine as for a whole model: recorded passes over KV in pages, tokens chosen on the device, levels that the
device grows by itself. What differs is the input: a row continues features of the target, or what its parent's row has
computed (`RowStates`).

Sources: EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840); see `outrider.engine.heads.eagle`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, linear

from outrider.engine.gpu.adapters.adapter_table import AdaptedPass, PlainPass
from outrider.engine.gpu.attention.tree_attention import AttentionPlan
from outrider.engine.gpu.devices import Runtime
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.engine import DeviceEngine
from outrider.engine.gpu.kernels import Kernels
from outrider.engine.gpu.passes.input_buffers import OutputInputs, RowInputs
from outrider.engine.gpu.passes.llama_layers import LlamaLayers
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.heads.eagle import Eagle, Eagle3

Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # embeddings and states to the residual and the layer's input


class EagleLayers(LlamaLayers):
    """One layer over the embedding of each row's token and the state that the row continues."""

    def __init__(self, network: Eagle | Eagle3, states: RowStates, *parts: Any, **sizes: Any) -> None:
        """For the other parameters see `LlamaLayers`."""
        super().__init__(*parts, **sizes)
        self._states = states
        self._normed = isinstance(network, Eagle3)
        self._enter = _entry(network, self.kernels, self.weights.embedding.dtype, self.hidden.device)
        # A row's position is that of its features' token.
        self._cos, self._sin = (torch.cat([table[:1], table[:-1]]) for table in (self._cos, self._sin))

    def compute(self, plan: AttentionPlan, inputs: RowInputs[Tensor], adapters: PlainPass | AdaptedPass) -> None:
        """Compute the states of all rows, with their keys and values."""
        kernels, form, kind = self.kernels, self.form, self.weights.embedding.dtype
        (layer,) = self.weights.layers
        kernels.move(self._cache, *inputs.moves)
        embedded = embedding(inputs.tokens, self.weights.embedding).float()
        residual, entered = self._enter(embedded, self._states.read(plan.rows))
        new = self._linear(entered, layer.qkv, None)
        queries = kernels.rotate(new, form, self._cos, self._sin, inputs.positions, self._cache[0], inputs.places, None)
        keys, values = self._cache[0]
        attended = kernels.attend(
            queries, keys, values, inputs.tiles, inputs.trees, inputs.pages, plan=plan, buffers=self.attention
        ).view(plan.rows, -1)
        normed = kernels.norm(residual, layer.ffn_norm, form.eps, kind, self._linear(attended, layer.output, None))
        units = kernels.gate(self._linear(normed, layer.gate_up, None))
        torch.add(residual, self._linear(units, layer.down, None), out=self.hidden[: plan.rows])
        self._states.write(self.hidden[: plan.rows])

    def logit_parts(self, inputs: OutputInputs[Tensor]) -> Tensor:
        if self._normed:
            return super().logit_parts(inputs)
        wanted = self.hidden.index_select(0, inputs.rows)
        return linear(wanted.to(self.weights.head.dtype), self.weights.head).float()


def _entry(network: Eagle | Eagle3, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Enter:
    """Return what makes the residual stream and the input of attention from embeddings and states."""
    if isinstance(network, Eagle):
        weight, bias = (it.detach().to(device, dtype) for it in (network.join.weight, network.join.bias))

        def join(embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            joined = linear(torch.cat([embedded, states], -1).to(dtype), weight, bias)
            return joined.float(), joined

        return join
    (token, token_eps), (state, state_eps) = (
        (it.weight.detach().to(device), it.eps or 0.0) for it in (network.token_norm, network.state_norm)
    )

    def normalize(embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        parts = kernels.norm(embedded, token, token_eps, dtype), kernels.norm(states, state, state_eps, dtype)
        return states, torch.cat(parts, -1)

    return normalize


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
        raise ValueError(f"cannot move rows of slot {slot}: those of drafts are never kept")
