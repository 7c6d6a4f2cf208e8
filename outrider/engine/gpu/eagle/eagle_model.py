"""EAGLE heads and the embeddings of their target, read to a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.gpu.attention.kv_memory import page_bytes
from outrider.engine.gpu.attention.page_table import pages_of
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.gpu.weights import DeviceDtype, DeviceLayer, ModelWeights
from outrider.engine.heads.checkpoint_io import load_network
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.torch_layers.weights import WeightReader, WeightSource

READ_AT_ONCE = 512  # rows of a text whose features are taken over together
KEPT_ROWS = READ_AT_ONCE + 64  # rows of each text whose features are kept beside a target, the latest
SPARE_PAGES = pages_of(KEPT_ROWS) + 4  # of each slot beyond the target's: of unread rows, seams, and a round's nodes


@dataclass(frozen=True, slots=True)
class EagleModel:
    """EAGLE heads and both embeddings of their target, on a device."""

    network: Eagle | Eagle3
    depth: int  # levels that the heads draft at most
    config: ModelConfig  # the sizes of the heads, over the ids of the target
    weights: ModelWeights

    @classmethod
    def read(
        cls,
        folder: Path,
        target: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        shared: ModelWeights | None = None,
    ) -> EagleModel:
        """Read a folder's heads. `source`: has the target's embeddings; `shared`: those that are on the device."""
        shape, network = load_network(folder)
        assert isinstance(network, Eagle | Eagle3)
        vocabulary = shape.vocabulary if shape.own_head else target.vocabulary
        config = replace(
            target,
            layers=1,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.inner,
            eps=shape.eps,
            rope=Rope(shape.theta, None),
            head_norms=False,
            unpadded_vocabulary=min(target.unpadded_vocabulary or target.vocabulary, vocabulary),
        )
        return cls(network, shape.depth, config, _weights(network, config, source, dtype, device, shared))

    def reserved(self, slots: int) -> int:
        """Return the bytes that heads beside a target take, with all but as many pages as the target has."""
        states = RowStates.bytes_of(slots, KEPT_ROWS, self.config.width, self.weights.embedding.dtype)
        return states + slots * SPARE_PAGES * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the heads' KV."""
        return page_bytes(self.config, self.weights.embedding.dtype)


def _weights(
    network: Eagle | Eagle3,
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    shared: ModelWeights | None,
) -> ModelWeights:
    """Return the weights of the heads' layer, and the embeddings, as those of a model."""
    reader = WeightReader(source, config, Shard(), device=device, dtype=dtype)
    embeddings = reader.embedding() if shared is None else shared.embedding
    if network.head is not None:
        own = network.head.weight.detach()[: config.vocabulary].to(device, dtype)
        head = pad(own, (0, 0, 0, config.vocabulary - len(own)))
    elif shared is not None:
        head = shared.head
    else:
        head = embeddings if config.tied else reader.head()
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
