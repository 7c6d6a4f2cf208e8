"""Models that the compressed-tensors package has quantized have the values that it makes of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.checkpoints.checkpoint import Weights

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# Schemes of the package, by the type of blocks that their weights become.
SCHEMES = {
    "W4A16": "int4_128",
    "W4A16_ASYM": "int4_128",
    "W8A16": "int8_128",
    "W8A8": "int8_128",
    "FP8_DYNAMIC": "fp8_128",
    "FP8_BLOCK": "fp8_128",
    "NVFP4A16": "nvfp4_256",
    "MXFP4A16": "mxfp4",
}


def grouped(weight: torch.Tensor, terms: Any) -> torch.Tensor:
    """The values of each scale: [..., values]."""
    rows, columns = weight.shape
    strategy = str(getattr(terms.strategy, "value", terms.strategy))
    if strategy in ("group", "tensor_group"):
        return weight.view(rows, -1, terms.group_size)
    if strategy == "block":
        height, width = terms.block_structure
        return weight.view(rows // height, height, columns // width, width).swapaxes(1, 2).flatten(2)
    return weight.view(rows, 1, columns)


def quantized(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Write a random model in a scheme of the package, rounded to the nearest code; return what it makes of that."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG).float()
    scheme = preset_name_to_scheme(name, targets=["Linear"])
    groups = {"all": scheme}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight, terms = module.weight.data, scheme.weights
        more = {}
        if hasattr(module, "weight_global_scale"):
            more["global_scale"] = generate_gparam(weight.amin(), weight.amax())
            module.weight_global_scale.data.fill_(more["global_scale"].item())
        values = grouped(weight, terms)
        scale, zero = calculate_qparams(values.amin(-1), values.amax(-1), terms, **more)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: it.detach().float().numpy() for name, it in model.named_parameters() if name.endswith("proj.weight")}


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    linears = quantized(tmp_path, name)
    weights = Weights(tmp_path)
    assert weights.main_kind == SCHEMES[name]
    assert sum(math.prod(it.shape) for it in linears.values()) > 500_000
    for key, expected in linears.items():
        found = weights.array(key, *expected.shape)
        # The package rounds what it makes of NVFP4 to bfloat16.
        np.testing.assert_allclose(found, expected, rtol=2**-8 if name == "NVFP4A16" else 0, atol=0, err_msg=key)
