"""EAGLE heads in a drafter on a device: one layer over a token's embedding and the state of the row before it.

It is an engine as for a whole model: recorded passes over KV in pages, tokens chosen on the device, levels that the
device grows by itself. What differs is the input. A row of a text continues the target's fused features of the token
before, which `feed` brings; a node continues what its parent's row has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from outrider.core.sampling.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.device.cuda_graphs import recorder_for
from outrider.engine.device.devices import check_device, fitting, kernels_for
from outrider.engine.device.eagle_layers import EagleLayers
from outrider.engine.device.engine import DeviceEngine
from outrider.engine.device.kv_memory import pages_for
from outrider.engine.device.page_table import pages_of
from outrider.engine.device.row_states import RowStates
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
        states = RowStates(slots, rows, config.width, weights.head.dtype, device)
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
            recorder=recorder_for(device),
            states=states,
            make_layers=partial(EagleLayers, network, states),
        )
        self.fed_width = config.width
        self.runs_on = False
        self._texts = FedTexts(slots, rows)

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
