"""Triton's kernels without a GPU: a process of its own, in which the interpreter runs them on CPU tensors.

Whether Triton interprets is decided when it is first imported, for the whole process, so other tests keep theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tests.engine.gpu.taped import DEVICE, ON_GPU


def interpreter() -> ProcessPoolExecutor:
    """Return a pool of one process whose kernels are interpreted."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=interpret)


def runner(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield `run` of a module of cases, on a GPU or in such a process; it is given the device behind its arguments."""
    if ON_GPU:
        yield lambda name, *arguments: run(name, *arguments, DEVICE)
    else:
        with interpreter() as pool:
            yield lambda name, *arguments: pool.submit(run, name, *arguments, "cpu").result()


def interpret() -> None:
    """Have this process, which has not imported Triton yet, interpret kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        # Triton calls int() on arrays of one number, bounds of loops among them, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched

    builder = interpreter.InterpreterBuilder
    product = builder.create_dot

    def widened(handle: Any) -> Any:
        """Return bfloat16 numbers, which NumPy knows as integers, as float32."""
        if handle.dtype != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    builder.create_dot = lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest)

    cast = builder.cast_impl

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        """Round float32 to bfloat16 as a GPU does, to the nearest; the interpreter drops bits."""
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, source, kind)
        numbers = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(numbers.view(torch.uint16).numpy().reshape(source.data.shape), tl.bfloat16)

    builder.cast_impl = rounded
