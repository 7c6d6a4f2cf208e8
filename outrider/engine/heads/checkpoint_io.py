"""Reads and writes a speculator's folder: config.json and the weights in safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.engine.checkpoints.checkpoint import SINGLE, Weights
from outrider.engine.heads.config import HeadsConfig, read_heads_config
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.torch_layers.linear import float_linear

CPU = torch.device("cpu")
Network = Medusa | MlpSpeculator | Eagle | Eagle3


def make_network(shape: HeadsConfig) -> Network:
    """Return a network of that shape with the initial weights of a training."""
    match shape.kind:
        case "medusa":
            return Medusa(shape)
        case "mlp":
            return MlpSpeculator(shape)
        case "eagle":
            return Eagle(shape)
        case "eagle-3":
            return Eagle3(shape)


def save_network(folder: Path, shape: HeadsConfig, network: Network, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and the weights into `folder`, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    shape.write(folder)


def load_network(folder: Path) -> tuple[HeadsConfig, Network]:
    """Return the shape and the network in float32, to train it further or to pack it. Raises CheckpointError."""
    shape = read_heads_config(folder)
    weights = Weights(folder)
    with torch.device("meta"):
        network = make_network(shape)
    state = {name: weights.take(name, *it.shape).float() for name, it in network.state_dict().items()}
    network.load_state_dict(state, assign=True)
    return shape, network


def pack_linears(network: nn.Module, dtype: torch.dtype, device: torch.device = CPU) -> None:
    """Replace the linears of a network by some with weights of a type on a device, which take and return float32; for
    drafting alone. On a CPU they are packed, and read weights faster.
    """
    for name, child in network.named_children():
        if isinstance(child, nn.Linear):
            setattr(network, name, _Packed(child, dtype) if device.type == "cpu" else _Placed(child, dtype, device))
        else:
            pack_linears(child, dtype, device)


class _Placed(nn.Module):
    """A linear on a device as a module."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._linear = linear.to(device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        computed: Tensor = self._linear(x.to(self._linear.weight.dtype))
        return computed.float()


class _Packed(nn.Module):
    """A packed linear as a module."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._linear = float_linear(
            linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.flatten(0, -2)).float().view(*x.shape[:-1], -1)
