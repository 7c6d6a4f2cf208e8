"""A speculator's folder: config.json and its weights in safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.engine.checkpoint import SINGLE, Weights
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.shape import Shape, read_shape
from outrider.engine.linear import float_linear

Network = Medusa | MlpSpeculator | Eagle | Eagle3


def make_network(shape: Shape) -> Network:
    """Of that shape, its weights as training begins with them."""
    match shape.kind:
        case "medusa":
            return Medusa(shape)
        case "mlp":
            return MlpSpeculator(shape)
        case "eagle":
            return Eagle(shape)
        case "eagle-3":
            return Eagle3(shape)


def save_network(folder: Path, shape: Shape, network: Network, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes both; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    shape.write(folder)


def load_network(folder: Path) -> tuple[Shape, Network]:
    """In float32, to be trained on or packed. Raises CheckpointError."""
    shape = read_shape(folder)
    weights = Weights(folder)
    with torch.device("meta"):
        network = make_network(shape)
    state = {name: weights.take(name, *it.shape).float() for name, it in network.state_dict().items()}
    network.load_state_dict(state, assign=True)
    return shape, network


def pack_linears(network: nn.Module, dtype: torch.dtype) -> None:
    """For drafting alone: puts linears in their place that read faster. They take and give float32."""
    for name, child in network.named_children():
        if isinstance(child, nn.Linear):
            setattr(network, name, _Packed(child, dtype))
        else:
            pack_linears(child, dtype)


class _Packed(nn.Module):
    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._linear = float_linear(
            linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.flatten(0, -2)).float().view(*x.shape[:-1], -1)
