"""Random low-rank adapters as files in PEFT's format, and checkpoints into whose weights one is merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from outrider.engine.adapters.low_rank import CONFIG, MODULES, TENSORS, linear_shape, read_adapter
from outrider.engine.checkpoints.checkpoint import SINGLE, ModelConfig, read_config


def make_adapter(
    folder: Path,
    config: ModelConfig,
    rank: int,
    seed: int,
    *,
    modules: Collection[str] = MODULES,
    deviation: float = 0.01,
) -> Path:
    """Write a random adapter of some linears of all layers."""
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float16]] = {}
    for layer in range(config.layers):
        for module, block in MODULES.items():
            if module not in modules:
                continue
            outputs, inputs = linear_shape(config, module)
            for name, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                key = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{name}.weight"
                tensors[key] = (np.float32(deviation) * random.standard_normal(shape, np.float32)).astype(np.float16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}), encoding="utf-8")
    return folder


def merge_adapter(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Write a checkpoint whose weights are those of another one plus B A, in float32 where there is one."""
    weights: dict[str, Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        weights |= load_file(file)
    for layer, updates in read_adapter(adapter, read_config(checkpoint)).layers.items():
        for module, (a, b) in updates.items():
            name = f"model.layers.{layer}.{MODULES[module]}.{module}.weight"
            weights[name] = weights[name].float() + torch.from_numpy(b) @ torch.from_numpy(a)
    folder.mkdir(parents=True)
    save_tensors(weights, folder / SINGLE)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    return folder
