"""The fusing of the target's features, which EAGLE heads on other machines need: at most one linear."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.heads.checkpoint_io import load_network, pack_linears
from outrider.engine.heads.config import HeadsConfig, read_heads_config
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.loading import check_heads, heads_dtype
from outrider.errors import ConfigError

_BYTES = 16  # of a digest


@dataclass(frozen=True, slots=True)
class Fusion:
    """The fusing of features in a verifier."""

    digest: bytes
    width: int  # of the fused features
    fuse: Callable[[Tensor], NDArray[np.uint16]]  # [rows, width * parts] to [rows, width], in the bits of bfloat16


def check_eagle(folder: Path, target: Path) -> HeadsConfig:
    """Return the config of EAGLE heads. Raises as `check_heads`, and ConfigError for heads of another kind."""
    shape = check_heads(folder, target)
    if not shape.eagle:
        raise ConfigError(f"{folder}: {shape.kind} heads draft inside the verifier alone; take EAGLE heads")
    return shape


def fusion_digest(folder: Path) -> bytes:
    """Return the digest that identifies the fusing of a folder's heads. Raises CheckpointError."""
    shape = read_heads_config(folder)
    return digest_of(weights_digest(folder), shape.kind, shape.layers)


def digest_of(weights: str, kind: str, layers: Sequence[int]) -> bytes:
    """Return the digest for heads of these weights and kind, fused from these layers."""
    text = f"{weights} {kind} {','.join(map(str, layers))}"
    return hashlib.sha256(text.encode()).digest()[:_BYTES]


def load_fusion(folder: Path, target: Path, *, precise: bool, device: str = "cpu") -> Fusion:
    """Load the fusing of a folder's heads on `target`, without their other weights. Raises as `check_eagle`.

    `device`: where the features are.
    """
    shape = check_eagle(folder, target)
    network = load_network(folder)[1]
    assert isinstance(network, Eagle | Eagle3)
    for name, _ in [*network.named_children()]:
        if name != "fuse":
            delattr(network, name)
    place = torch.device(device)
    pack_linears(network, heads_dtype(precise=precise, device=place), place)

    def fuse(features: Tensor) -> NDArray[np.uint16]:
        with torch.inference_mode():
            fused: NDArray[np.uint16] = network.enter(features).bfloat16().view(torch.uint16).cpu().numpy()
            return fused

    return Fusion(fusion_digest(folder), shape.width, fuse)
