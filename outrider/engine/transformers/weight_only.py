"""int8 and int4 weights for models of `transformers`, with torchao: inputs and all else stay bfloat16.

As in the native engines, a checkpoint's weights are quantized while it loads. Weight-only: a weight is converted back
to bfloat16 when it is used, which saves memory, and time only where the kernel is fused.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigError

GROUP = 32  # inputs that share a scale in int4
OUTPUTS = 16  # int4's kernel needs a multiple of this many outputs


def quantize(model: Any, dtype: Literal["int8", "int4"]) -> None:
    """Quantize all linears but the head, in place.

    Raises ConfigError when torchao is missing or has no kernel for this machine, or the model has no suitable linear.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        if dtype == "int4":
            from torchao.prototype.quantization.int4 import Int4OpaqueTensor, PrototypeInt4WeightOnlyConfig
    except ImportError:
        raise ConfigError(
            f"dtype: {dtype} needs torchao, of a version that has its kernels for CPUs; "
            "pip install 'outrider[transformers]', or use bfloat16"
        ) from None
    _replace_conv1d(model)
    head = model.get_output_embeddings()
    chosen = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    if dtype == "int4":
        chosen = [module for module in chosen if not (module.in_features % GROUP or module.out_features % OUTPUTS)]
    if not chosen:
        raise ConfigError(f"dtype: this model has no linear layers that torchao quantizes to {dtype}; use bfloat16")
    if dtype == "int8":
        config: Any = Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    wanted = {id(module) for module in chosen}
    try:
        quantize_(model, config, filter_fn=lambda module, name: id(module) in wanted)
        with torch.inference_mode():
            chosen[0](torch.zeros(2, chosen[0].in_features, dtype=torch.bfloat16))
    except (RuntimeError, NotImplementedError, ImportError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"dtype: torchao cannot do {dtype} here ({str(error).splitlines()[0] if str(error) else error!r}); "
            "use bfloat16"
        ) from None
    if dtype == "int4" and not any(isinstance(module.weight, Int4OpaqueTensor) for module in chosen):
        raise ConfigError("dtype: torchao has quantized nothing of this model to int4; use int8 or bfloat16")


def _replace_conv1d(model: nn.Module) -> None:
    """Replace the transposed linears of GPT-2 by ordinary ones, the only ones that torchao quantizes."""
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, Conv1D):
                inputs, outputs = child.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta")
                linear.weight = nn.Parameter(child.weight.detach().t().contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
                setattr(parent, name, linear)
