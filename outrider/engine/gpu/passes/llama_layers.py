"""The layers and the head of a model on a device: what a pass computes between its inputs and its choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.adapters.adapter_table import AdaptedPass, PlainPass
from outrider.engine.gpu.attention.tree_attention import AttentionBuffers, AttentionPlan
from outrider.engine.gpu.devices import Runtime
from outrider.engine.gpu.kernels import LayerForm
from outrider.engine.gpu.linears.float8 import Float8Weight, linear8
from outrider.engine.gpu.linears.int4 import GroupedInt4Weight, linear4
from outrider.engine.gpu.passes.input_buffers import OutputInputs, RowInputs
from outrider.engine.gpu.passes.packing import MOST_ROWS
from outrider.engine.gpu.weights import ModelWeights, Weight
from outrider.engine.interface.features import Features
from outrider.engine.torch_layers.linear import Linear

CONVERTED = 2**24  # weights of 8 or 4 bits that are converted at once, for passes of many rows


class LlamaLayers:
    """The layers of a model of the Llama family, or of a rank's part of one.

    Their buffers never move, so that recordings can use them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: Tensor,
        runtime: Runtime,
        *,
        positions: int,
        plans: Sequence[AttentionPlan],
        features: Features | None,
    ) -> None:
        """`config`: the shape of this rank's part; `cache`: [layers, 2, pages, kv_heads, PAGE_ROWS, dim]; `plans`: of
        all numbers of rows; `features`: that passes return.
        """
        device = runtime.device
        self.vocabulary = config.vocabulary
        self.weights = weights
        self.form = LayerForm(config.heads, config.kv_heads, config.head_dim, config.eps)
        self.hidden = torch.zeros(MOST_ROWS, config.width, device=device)  # behind the last layer, of a pass's rows
        parts = 0 if features is None else features.parts
        self.features = torch.zeros(MOST_ROWS if parts else 0, parts, config.width, device=device)
        self.attention = AttentionBuffers.of(plans, device)
        table = config.rope.table(positions, config.head_dim)
        self._cos, self._sin = (torch.from_numpy(part).to(device) for part in table)
        self._cache = cache
        self._wanted = features
        ids = config.draft_ids
        self._head_ids = torch.tensor(ids).to(device) if ids else None  # of the rows of the head; None: it has all
        self._group = runtime.group
        self.kernels = runtime.kernels
        converted = CONVERTED if weights.dtype in ("float8", "int4") and device.type == "cuda" else 0
        self._converted = torch.empty(converted, dtype=cache.dtype, device=device) if converted else None

    def compute(self, plan: AttentionPlan, inputs: RowInputs[Tensor], adapters: PlainPass | AdaptedPass) -> None:
        """Move cache rows, and compute the residual stream of all rows, with their keys and values."""
        kernels, weights, form, add = self.kernels, self.weights, self.form, self._group.all_reduce
        kind, last = weights.embedding.dtype, len(weights.layers) - 1
        kernels.move(self._cache, *inputs.moves)
        hidden = self._group.all_gather(embedding(inputs.tokens, weights.embedding)).float()
        normed = kernels.norm(hidden, weights.layers[0].attention_norm, form.eps, kind)
        for index, layer in enumerate(weights.layers):
            new = self._linear(normed, layer.qkv, layer.qkv_bias)
            adapters.add(normed, new, index, "qkv")
            queries = kernels.rotate(
                new, form, self._cos, self._sin, inputs.positions, self._cache[index], inputs.places, layer.head_norms
            )
            keys, values = self._cache[index]
            attended = kernels.attend(
                queries, keys, values, inputs.tiles, inputs.trees, inputs.pages, plan=plan, buffers=self.attention
            ).view(plan.rows, -1)
            part = self._linear(attended, layer.output, layer.output_bias)
            adapters.add(attended, part, index, "output")
            normed = kernels.norm(hidden, layer.ffn_norm, form.eps, kind, add(part))
            gate_up = self._linear(normed, layer.gate_up, layer.gate_up_bias)
            adapters.add(normed, gate_up, index, "gate_up")
            units = kernels.gate(gate_up)
            part = self._linear(units, layer.down, layer.down_bias)
            adapters.add(units, part, index, "down")
            out = add(part)
            if index < last:
                normed = kernels.norm(hidden, weights.layers[index + 1].attention_norm, form.eps, kind, out)
                self._copy_features(hidden, index + 1)
        torch.add(hidden, out, out=self.hidden[: plan.rows])
        if self._wanted is not None and not self._wanted.layers:
            normed = kernels.norm(self.hidden[: plan.rows], weights.norm, form.eps, torch.float32)
            self.features[: plan.rows, 0] = normed

    def _copy_features(self, hidden: Tensor, layer: int) -> None:
        """Copy the output of a layer, the first is 1, to where features are wanted."""
        for part, wanted in enumerate(() if self._wanted is None else self._wanted.layers):
            if wanted == layer:
                self.features[: len(hidden), part] = hidden

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Float8Weight):
            return linear8(x, weight, bias, self._converted)
        if isinstance(weight, GroupedInt4Weight):
            return linear4(x, weight, bias, self._converted)
        if isinstance(weight, Linear):
            return weight(x) if bias is None else weight(x).add_(bias)
        return linear(x, weight, bias)

    def logit_parts(self, inputs: OutputInputs[Tensor]) -> Tensor:
        """Return the logits of the rows that want them, in parts to be added; of this rank's ids."""
        wanted = self.hidden.index_select(0, inputs.rows)
        logits = self.kernels.head(wanted, self.weights.norm, self.form.eps, self.weights.head)
        if self._head_ids is None:
            return logits
        known = logits[:, : len(self._head_ids)]
        return logits.new_full((len(logits), self.vocabulary), -torch.inf).index_copy_(1, self._head_ids, known)
