"""How a checkpoint's weights are quantized, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError

KEY = "quantization_config"
SERVED = (
    "awq (4 bits, gemm), gptq (4 or 8 bits), compressed-tensors (int4, int8, FP8, NVFP4, MXFP4), fp8, fbgemm_fp8, "
    "modelopt (FP8, NVFP4)"
)
_NEAREST = {  # the served method that is most like each of these
    "auto-round": "gptq",
    "bitsandbytes": "compressed-tensors in int8 or int4",
    "eetq": "compressed-tensors in int8",
    "hqq": "gptq with 4 bits",
    "mxfp4": "compressed-tensors in MXFP4",
    "quanto": "compressed-tensors in int8 or int4",
    "torchao": "compressed-tensors",
}
_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)


@dataclass(frozen=True, slots=True)
class Method:
    """How weights are quantized."""

    name: str
    bits: int = 4  # of a code, for gptq
    below: int = 0  # of gptq: what a stored zero is less than the code of zero


def read_method(config: Mapping[str, Any], path: Path) -> Method | None:
    """Return what a configuration says; None: its weights are not quantized.

    Raises CheckpointError for a method that is not served, with the nearest that is.
    """
    said = config.get(KEY)
    if said is None:
        return None
    name = said.get("quant_method") if isinstance(said, dict) else None
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: {KEY} has no quant_method; download the checkpoint again")

    def refused(what: str, nearest: str) -> CheckpointError:
        return CheckpointError(
            f"{path}: the weights are quantized with {what}, which is not served; take a checkpoint in {nearest}, the "
            f"nearest that is (served are {SERVED}, and GGUF files)"
        )

    def chosen(field: str, served: tuple[Any, ...], nearest: str, default: Any = None) -> Any:
        value = said.get(field, default)
        if value not in served:
            raise refused(f"{name}, {field} {value!r:.40}", nearest)
        return value

    if name == "awq":
        chosen("bits", (4,), "awq with 4 bits", 4)
        chosen("version", ("gemm", "GEMM"), "awq, version gemm", "gemm")
        return Method(name)
    if name == "gptq":
        bits = chosen("bits", (4, 8), "gptq with 4 or 8 bits")
        form = chosen("checkpoint_format", ("gptq", "gptq_v2"), "gptq, checkpoint_format gptq", "gptq")
        return Method(name, bits, 1 if form == "gptq" else 0)
    if name == "compressed-tensors":
        chosen("format", _COMPRESSED, "compressed-tensors, format pack-quantized")
        for field in ("sparsity_config", "transform_config"):
            if said.get(field):
                raise refused(f"compressed-tensors and {field}", "compressed-tensors without one")
        return Method(name)
    if name == "modelopt":
        chosen("quant_algo", ("FP8", "NVFP4"), "modelopt, quant_algo FP8 or NVFP4")
        return Method(name)
    if name in ("fp8", "fbgemm_fp8"):
        return Method(name)
    raise refused(f"{name:.40}", _NEAREST.get(name, "gptq with 4 bits"))
