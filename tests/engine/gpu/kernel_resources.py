"""Registers and shared memory that kernels take of an H100, found without one.

`python -m tests.engine.gpu.kernel_resources` prints them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from outrider.engine.gpu.adapters.low_rank import AdapterPlan
from outrider.engine.gpu.attention.tree_attention import AttentionPlan
from outrider.engine.gpu.linears.float8 import FINISHED, Float8Plan
from outrider.engine.gpu.linears.int4 import plan_of
from outrider.engine.torch_layers.int4 import GROUP

ROWS = (1, 64, 2048)
DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float32)
ARCHITECTURE = 90
DIVISIBLE = [["tt.divisibility", 16]]
FLOAT8_SHAPES = [
    (rows, inputs, outputs) for rows in (16, 32, 64) for inputs, outputs in ((4096, 28672), (4096, 4096), (4112, 28672))
]  # rows, inputs, outputs: results at once, and in parts; all steps full, and not
SPILLED = 32  # bytes of a thread, stored and loaded: what Triton 3.7 spills where 3.6 spills nothing
UNALIGNED = ("tiles", "trees", "pages", "scale")


class Resources(NamedTuple):
    """Of one thread, but for shared memory, which is a program's, in bytes."""

    kernel: str
    plan: AttentionPlan | Float8Plan | AdapterPlan
    registers: int
    spilled: int  # bytes stored and loaded
    shared: int


def plans() -> Collection[AttentionPlan]:
    """Return plans of which each needs other kernels."""
    found: dict[str, AttentionPlan] = {}
    for dtype in DTYPES:
        for dim in DIMS:
            for rows in ROWS:
                plan = AttentionPlan.of(rows, heads=32, kv_heads=8, dim=dim, dtype=dtype, segments=32, text_pages=128)
                found.setdefault(f"{dtype} {plan.attend_constants} {plan.num_warps} {plan.num_stages}", plan)
    return found.values()


def compiled(plan: AttentionPlan) -> Iterator[Resources]:
    """Compile the kernels that a plan launches."""
    from outrider.engine.gpu.attention.tree_attention_kernels import attend, combine

    rows = {"KEY_ROW": plan.dim, "VALUE_ROW": plan.dim}
    yield _compiled(attend, plan, plan.attend_constants | rows, plan.num_warps, plan.num_stages)
    if plan.splits > 1:
        yield _compiled(combine, plan, plan.combine_constants, 4, 1)


def compiled_float8(plan: Float8Plan) -> Iterator[Resources]:
    """Compile the kernels that a plan launches."""
    from outrider.engine.gpu.linears.float8_kernels import finish, multiply

    split = plan.splits > 1
    types = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "bias": "*bf16", "sums": "*fp32"}
    constants = plan.constants | {"SPLIT": split, "BIASED": not split}
    result = {"result": "*fp32" if split else "*bf16"}
    yield _made(multiply, plan, types | result, constants, ("rows",), plan.num_warps, plan.num_stages)
    if split:
        constants = {"SPLITS": plan.splits, "SCALED": True, "BIASED": True, "BLOCK": FINISHED}
        yield _made(finish, plan, types | {"result": "*bf16"}, constants, ("rows",), 4, 1)


def compiled_int4(plan: Float8Plan) -> Iterator[Resources]:
    """Compile the kernel that reads the weights."""
    from outrider.engine.gpu.linears.int4_kernels import multiply4

    split = plan.splits > 1
    types = {"x": "*bf16", "values": "*u8", "scales": "*bf16", "bias": "*bf16"}
    constants = plan.constants | {"GROUP": GROUP, "SPLIT": split, "BIASED": not split}
    result = {"result": "*fp32" if split else "*bf16"}
    yield _made(multiply4, plan, types | result, constants, ("rows",), plan.num_warps, plan.num_stages)


def adapter_plans() -> list[tuple[AdapterPlan, torch.dtype]]:
    """Return plans of which each needs other kernels, with their types."""
    return [(AdapterPlan.of(rows, adapters=32, dtype=dtype), dtype) for dtype in DTYPES for rows in ROWS]


def compiled_low_rank(plan: AdapterPlan, dtype: torch.dtype) -> Iterator[Resources]:
    """Compile the kernels that a plan launches, for the inputs of Llama-3.1-8B."""
    from outrider.engine.gpu.adapters.low_rank_kernels import expand, shrink

    element = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = {"x": element, "result": element, "order": "*i32", "tiles": "*i64", "sums": "*fp32"}
    unaligned = ("entry", "rows")
    constants = plan.constants | {"BLOCK_K": plan.block_k}
    yield _made(shrink, plan, types, constants, unaligned, plan.num_warps, plan.num_stages)
    for inputs in (4096, 14336):
        constants = plan.constants | {"BLOCK_N": plan.block_n, "SPLITS": plan.splits(inputs)}
        yield _made(expand, plan, types, constants, unaligned, plan.num_warps, 1)


def _compiled(kernel: Any, plan: AttentionPlan, constants: dict[str, Any], warps: int, stages: int) -> Resources:
    element = "*bf16" if plan.dtype == torch.bfloat16 else "*fp32"
    floats = ("accumulators", "peaks", "totals")
    types = dict.fromkeys(("queries", "keys", "values", "result"), element)
    types |= dict.fromkeys(("tiles", "trees", "pages"), "*i32") | dict.fromkeys(floats, "*fp32") | {"scale": "fp32"}
    return _made(kernel, plan, types, constants, UNALIGNED, warps, stages)


def _made(
    kernel: Any,
    plan: AttentionPlan | Float8Plan | AdapterPlan,
    types: dict[str, str],
    constants: dict[str, Any],
    unaligned: Collection[str],
    warps: int,
    stages: int,
) -> Resources:
    """Compile one kernel. `types`: of its parameters that are neither 32-bit integers nor constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (index,): DIVISIBLE
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and name not in unaligned
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options)
    return Resources(kernel.__name__, plan, *_assembled(made.asm["ptx"]), made.metadata.shared)


def _assembled(ptx: str) -> tuple[int, int]:
    """Return registers, and bytes spilled."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(program), "-v", f"--gpu-name=sm_{ARCHITECTURE}a", str(source), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.findall(r"(\d+) bytes spill", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None
    assert len(spilled) == 2, log
    return int(registers[1]), sum(map(int, spilled))


if __name__ == "__main__":
    for plan in plans():
        for it in compiled(plan):
            print(
                f"{it.kernel:8} {plan.dtype!s:15} dim {plan.dim:3} rows {plan.rows:4} M {plan.block_m:3} "
                f"N {plan.block_n} splits {plan.splits:2} registers {it.registers:3} spilled {it.spilled:5} "
                f"shared {it.shared}"
            )
    for shape in FLOAT8_SHAPES:
        float8 = Float8Plan.of(*shape)
        for it in (*compiled_float8(float8), *compiled_int4(plan_of(*shape))):
            print(f"{it.kernel} {it.plan} registers {it.registers} spilled {it.spilled} shared {it.shared}")
    for adapters, dtype in adapter_plans():
        for it in compiled_low_rank(adapters, dtype):
            print(f"{it.kernel} {dtype} {it.plan} registers {it.registers} spilled {it.spilled} shared {it.shared}")
