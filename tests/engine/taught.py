"""Heads for tests: random ones, and ones that were fitted to one text. Seconds each, on one thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from outrider.config import KvType
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEagleDrafts, DeviceEngine
from outrider.engine.heads.checkpoint_io import Network, make_network, save_network
from outrider.engine.heads.config import HeadsConfig, Kind, make_heads_config, read_heads_config
from outrider.engine.heads.eagle import Eagle, Eagle3, attend_causally
from outrider.engine.heads.embeddings import TargetEmbeddings, read_target_embeddings
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.torch_layers.weights import complex_rotations
from tests.engine.gpu.taped import DEVICE
from tests.engine.small_checkpoints import prompt

DEPTH = 4


def random_heads(kind: Kind, target: Path, folder: Path, *, own_head: bool = False) -> tuple[HeadsConfig, Network]:
    """Of no use, and saved in `folder`; as large as what they are added to."""
    shape = make_heads_config(kind, read_config(target), depth=DEPTH, own_head=own_head)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(11)
        network = make_network(shape)
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    save_network(folder, shape, network, torch.float32)
    return shape, network


def greedy(target: Path, text: Sequence[int], count: int, kv_dtype: KvType = "auto") -> list[int]:
    """A text, and what the target generates greedily after it."""
    engine = CpuEngine.load(target, EngineSettings(dtype="float32", kv_dtype=kv_dtype, slots=1, threads=1))
    tokens = [*text]
    logits = engine.forward([prompt(0, np.array(tokens), wanted=1)])
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits = engine.forward([prompt(0, np.array(tokens[-1:]), len(tokens) - 1)])
    return tokens


def features_of(target: Path, features: Features, text: Sequence[int]) -> Tensor:
    """The target's features of each token of a text: [tokens, width * parts]."""
    engine = CpuEngine.load(target, EngineSettings(dtype="float32", slots=1, threads=1, features=features))
    engine.forward([prompt(0, np.array([*text]))])
    return engine.hidden().clone()


def taught_heads(kind: Kind, target: Path, folder: Path, text: Sequence[int]) -> None:
    """Heads in `folder` that predict how that text goes on, at every place in it."""
    shape = make_heads_config(kind, read_config(target), depth=DEPTH, own_head=kind == "medusa")
    with torch.random.fork_rng():
        torch.manual_seed(11)
        network = make_network(shape)
        features, ends, tokens = (
            features_of(target, shape.features, text),
            read_target_embeddings(target, torch.float32, training=True),
            [*text],
        )
        match network:
            case Medusa():
                _fit_medusa(network, features, torch.tensor(tokens))
            case Eagle():
                _fit_eagle(network, features, ends, torch.tensor(tokens))
            case MlpSpeculator():
                _train(network, lambda: _mlp_loss(network, features, ends, torch.tensor(tokens)))
            case Eagle3():
                _train(network, lambda: _eagle_loss(network, shape, features, ends, torch.tensor(tokens)))
    save_network(folder, shape, network, torch.float32)


def _fit_medusa(network: Medusa, features: Tensor, tokens: Tensor) -> None:
    """Least squares: a text that is shorter than features are wide is learned by heart."""
    for ahead, head in enumerate(network.heads, 2):
        following = torch.zeros(len(tokens) - ahead, head.out_features)  # type: ignore[arg-type]
        following[torch.arange(len(following)), tokens[ahead:]] = 20.0
        head.weight.data = _solve(features[: len(following)], following)


def _fit_eagle(network: Eagle, features: Tensor, ends: TargetEmbeddings, tokens: Tensor) -> None:
    """Least squares too: the layer adds nothing to what joins token and feature."""
    network.layer.output.weight.data.zero_()
    network.layer.down.weight.data.zero_()
    network.join.bias.data.zero_()
    seen = torch.cat([ends.embed(tokens[1:]), features[:-1]], -1)
    network.join.weight.data = _solve(seen, features[1:])


def _solve(inputs: Tensor, outputs: Tensor) -> Tensor:
    return torch.linalg.lstsq(inputs.double(), outputs.double(), driver="gelsd").solution.T.float().contiguous()


def _mlp_loss(network: MlpSpeculator, features: Tensor, ends: TargetEmbeddings, tokens: Tensor) -> Tensor:
    count = len(tokens) - DEPTH - 1
    states, loss = features[:count], torch.zeros(())
    for level in range(DEPTH):
        states = network(level, states, ends.embed(tokens[level + 1 : level + 1 + count]))
        loss = loss + cross_entropy(network.logits(states, ends.unembed), tokens[level + 2 : level + 2 + count])
    return loss


def _eagle_loss(
    network: Eagle3, shape: HeadsConfig, features: Tensor, ends: TargetEmbeddings, tokens: Tensor
) -> Tensor:
    turns = complex_rotations(Rope(shape.theta, None), len(tokens) - 2, shape.head_dim)
    given = network(ends.embed(tokens[1:-1]), network.enter(features[:-2]), turns, attend_causally)
    return cross_entropy(network.logits(given, ends.unembed), tokens[2:])


def _train(network: Network, loss: object) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        now = loss()  # type: ignore[operator]
        now.backward()
        optimizer.step()


def target_with_heads(target: Path, heads: Path, **terms: Any) -> DeviceEngine:
    """A target on a device, with EAGLE heads beside it."""
    features = read_heads_config(heads).features
    engine = DeviceEngine.load(
        target, EngineSettings(device=DEVICE, dtype="float32", features=features, heads=heads, **terms)
    )
    DeviceEagleDrafts(engine)
    return engine
