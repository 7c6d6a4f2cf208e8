"""EAGLE heads in a drafter on a device: one layer over a token's embedding and the state of the row before it.

It is an engine as for a whole model: recorded passes over KV in pages, tokens chosen on the device, levels that the
device grows by itself. What differs is the input. A row of a text continues the target's fused features of the token
before, which `feed` brings; a node continues what its parent's row has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, linear, pad

from outrider.core.sampling.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.device.adapter_table import AdaptedPass, PlainPass
from outrider.engine.device.cuda_graphs import CudaGraphs, NoRecorder
from outrider.engine.device.engine import DeviceEngine, check_device, fitting, kernels_for
from outrider.engine.device.input_buffers import OutputInputs, RowInputs
from outrider.engine.device.kernels import Kernels
from outrider.engine.device.kv_memory import pages_for
from outrider.engine.device.page_table import pages_of
from outrider.engine.device.row_states import RowStates
from outrider.engine.device.tree_attention import AttentionPlan
from outrider.engine.device.weights import DeviceDtype, DeviceLayer, ModelWeights
from outrider.engine.eager.weights import WeightReader
from outrider.engine.engine import SCRATCH
from outrider.engine.growth import GrownLevel, Growth
from outrider.engine.heads.checkpoint_io import load_network
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.fed_texts import FedTexts
from outrider.engine.heads.fusing import check_eagle
from outrider.engine.logits import HostLogits, Logits
from outrider.engine.ranks.group import ALONE
from outrider.engine.ranks.sharding import Shard
from outrider.errors import ConfigError

Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # embeddings and states to the residual and the layer's input


class DeviceEagle(DeviceEngine):
    """An engine over EAGLE heads on a device.

    A pass that continues a text drops the nodes behind it, so rows are never moved. The rows of a slot are counted from
    its first row that has features.
    """

    def __init__(
        self,
        network: Eagle | Eagle3,
        config: ModelConfig,
        weights: ModelWeights,
        digest: bytes,
        *,
        device: torch.device,
        slots: int,
        rows: int,
        pages: int,
    ) -> None:
        """`config`: the sizes of the heads, over the ids of the target; `weights`: of their layer, and both embeddings;
        `digest`: of the target's tokenizer.
        """
        super().__init__(
            config,
            weights,
            digest,
            device=device,
            slots=slots,
            rows=rows,
            pages=pages,
            group=ALONE,
            kernels=kernels_for(device),
            recorder=CudaGraphs(device) if device.type == "cuda" else NoRecorder(),
            states=RowStates(slots, rows, config.width, weights.head.dtype, device),
        )
        self.fed_width = config.width
        self.runs_on = False
        self._texts = FedTexts(slots, rows)
        self._enter = _entry(network, self._kernels, weights.head.dtype, device)
        self._normed = isinstance(network, Eagle3)
        # A row's position is that of its features' token.
        self._cos, self._sin = (torch.cat([table[:1], table[:-1]]) for table in (self._cos, self._sin))

    @classmethod
    def load_heads(cls, folder: Path, target: Path, *, device: str, precise: bool, slots: int) -> DeviceEagle:
        """Load a folder's heads and both embeddings of `target`, whose layers are not read.

        Raises as `check_eagle`, and ConfigError for a device that is missing or too small.
        """
        check_eagle(folder, target)
        place, dtype = check_device(device), torch.float32 if precise else torch.bfloat16
        shape, network = load_network(folder)
        assert isinstance(network, Eagle | Eagle3)
        whole = read_config(target)
        vocabulary = shape.vocabulary if shape.own_head else whole.vocabulary
        config = replace(
            whole,
            layers=1,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.inner,
            eps=shape.eps,
            rope=Rope(shape.theta, None),
            head_norms=False,
            unpadded_vocabulary=min(whole.unpadded_vocabulary or whole.vocabulary, vocabulary),
        )
        rows = whole.context + SCRATCH
        with torch.inference_mode(), fitting(place):
            weights = _weights(network, config, Weights(target), dtype, place)
            reserved = RowStates.bytes_of(slots, rows, shape.width, dtype)
            pages = pages_for(place, config, dtype, slots, rows, None, ALONE, reserved)
            if pages < slots * pages_of(rows):
                raise ConfigError(
                    f"heads: {place} has too little memory for {slots} texts of {whole.context} tokens; lower slots"
                )
            digest = read_tokenizer_digest(target)
            return cls(network, config, weights, digest, device=place, slots=slots, rows=rows, pages=pages)

    def feed(self, slot: int, start: int, rows: NDArray[np.uint16], *, restart: bool) -> None:
        assert self._states is not None
        rows = rows[: max(0, self.rows - start)]
        with torch.inference_mode():
            self._states.feed(slot, start, rows)
        self._texts.feed(slot, start, start + len(rows), restart=restart)

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        present = self._present(segments)
        return super().forward(present) if present else np.empty((0, self.vocabulary), np.float32)

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        self.check_segments(segments)
        present = self._present(segments)
        if not present:
            return HostLogits(np.empty((0, self.vocabulary), np.float32))
        by_slot = dict(zip((it.slot for it in segments), draws, strict=True))
        return super().sample(present, [by_slot[it.slot] for it in present], best)

    def grow(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], growths: Sequence[Growth | None], levels: int
    ) -> tuple[Logits, list[GrownLevel]]:
        self.check_segments(segments)
        given = {it.slot: (draw, growth) for it, draw, growth in zip(segments, draws, growths, strict=True)}
        present = self._present(segments)
        drawn = [given[it.slot][0] for it in present]
        shifted = [self._shifted(it.slot, given[it.slot][1]) for it in present]
        return super().grow(present, drawn, shifted, levels)

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        super().copy(source, target, self._texts.copy(source, target, rows))

    def release(self, slot: int, rows: int) -> None:
        super().release(slot, max(0, rows - self._texts.base(slot)))

    def _present(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the rows that have features, or continue computed states, counted from each slot's first one."""
        found = [rest for segment in segments if (rest := self._texts.with_features(segment)) is not None]
        return [replace(it, prefix=it.prefix - self._texts.base(it.slot)) for it in found]

    def _shifted(self, slot: int, growth: Growth | None) -> Growth | None:
        return None if growth is None else replace(growth, base=growth.base - self._texts.base(slot))

    def _send_states(self, segments: Sequence[Segment]) -> None:
        assert self._states is not None
        self._states.send(segments, [self._texts.base(it.slot) for it in segments])

    def _compute_layers(
        self, plan: AttentionPlan, inputs: RowInputs[Tensor], adapters: PlainPass | AdaptedPass
    ) -> None:
        """Compute the states of all rows, with their keys and values."""
        assert self._states is not None
        kernels, form, kind = self._kernels, self._form, self._weights.head.dtype
        (layer,) = self._weights.layers
        kernels.move(self._cache, *inputs.moves)
        embedded = embedding(inputs.tokens, self._weights.embedding).float()
        residual, entered = self._enter(embedded, self._states.read(plan.rows))
        new = self._linear(entered, layer.qkv, None)
        queries = kernels.rotate(new, form, self._cos, self._sin, inputs.positions, self._cache[0], inputs.places, None)
        keys, values = self._cache[0]
        attended = kernels.attend(
            queries, keys, values, inputs.tiles, inputs.trees, inputs.pages, plan=plan, buffers=self._attention
        ).view(plan.rows, -1)
        normed = kernels.norm(residual, layer.ffn_norm, form.eps, kind, self._linear(attended, layer.output, None))
        units = kernels.gate(self._linear(normed, layer.gate_up, None))
        torch.add(residual, self._linear(units, layer.down, None), out=self._hidden[: plan.rows])
        self._states.write(self._hidden[: plan.rows])

    def _logit_parts(self, inputs: OutputInputs[Tensor]) -> Tensor:
        if self._normed:
            return super()._logit_parts(inputs)
        wanted = self._hidden.index_select(0, inputs.rows)
        return linear(wanted.to(self._weights.head.dtype), self._weights.head).float()


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


def _weights(
    network: Eagle | Eagle3, config: ModelConfig, target: Weights, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Return the weights of the heads' layer, and the embeddings, as those of a model."""
    reader = WeightReader(target, config, Shard(), device=device, dtype=dtype)
    embeddings = reader.embedding()
    if network.head is None:
        head = embeddings if config.tied else reader.head()
    else:
        own = network.head.weight.detach()[: config.vocabulary].to(device, dtype)
        head = pad(own, (0, 0, 0, config.vocabulary - len(own)))
    layer = network.layer
    qkv, output, gate_up, down = (
        it.weight.detach().to(device, dtype) for it in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    norm = network.norm.weight if isinstance(network, Eagle3) else torch.ones(config.width)
    ffn_norm = layer.norm.weight.detach().to(device)
    packed = DeviceLayer(ffn_norm, qkv, None, None, output, None, ffn_norm, gate_up, None, down, None)
    parameters = sum(it.numel() for it in network.parameters())
    parameters += 0 if network.head is not None else config.width * config.vocabulary
    kind: DeviceDtype = "float32" if dtype == torch.float32 else "bfloat16"
    return ModelWeights(embeddings, (packed,), norm.detach().to(device), head, parameters, kind)
