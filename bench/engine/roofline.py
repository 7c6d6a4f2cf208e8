"""The machine's limit: its rate of reading weights and of multiplying. `python -m bench.engine.roofline THREADS`.

`python -m bench.engine.roofline THREADS again` reads once for each line on stdin and answers with the rate. The reading
rate of a machine that shares its memory with others varies, so a time is compared with a rate measured next to it.

A step reads every weight once, so it takes at least the size of the weights over the reading rate, and at least its
multiplications over the matrix rate. Both rates are measured here, each as the best of several methods.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.rows.processes import output
from outrider.fleet import process_env

if TYPE_CHECKING:
    from torch import Tensor, dtype

POOL_BYTES = 2**29  # read in one pass: much larger than any cache
SIDE = 4096  # of the matrices that are read
SQUARE = 2048  # side of the matrices that are multiplied
ROWS = (1, 2, 4)  # input rows of the linear layers that read the pool
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of this machine with a number of threads."""

    threads: int
    read_gb_s: float  # 10^9 bytes per second, the best of `ways`
    bfloat16_gflops: float
    float32_gflops: float
    ways: dict[str, float]  # reading rate of each method, in 10^9 bytes per second

    def better(self, other: Limit) -> Limit:
        """Return the better of two measurements: other work on the machine can only lower the rates."""
        return Limit(
            self.threads,
            max(self.read_gb_s, other.read_gb_s),
            max(self.bfloat16_gflops, other.bfloat16_gflops),
            max(self.float32_gflops, other.float32_gflops),
            {way: max(rate, other.ways.get(way, 0.0)) for way, rate in self.ways.items()},
        )

    def floor_s(self, weight_bytes: int, rows: int, dtype: str) -> float:
        """Return the lower bound of a pass over `rows` rows."""
        weights = weight_bytes // (2 if dtype == "bfloat16" else 4)
        return max(self.read_s(weight_bytes), self.multiply_s(weights, rows, dtype))

    def read_s(self, weight_bytes: int) -> float:
        """Return the time to read the weights, in seconds."""
        return weight_bytes / (self.read_gb_s * 1e9)

    def multiply_s(self, weights: int, rows: int, dtype: str) -> float:
        """Return the time to multiply rows with weights, in seconds: two operations for each pair."""
        rate = self.bfloat16_gflops if dtype == "bfloat16" else self.float32_gflops
        return 2.0 * rows * weights / (rate * 1e9)


async def measure(threads: int) -> Limit:
    """Measure the limit in a separate process. Raises Unavailable when that fails."""
    line = await output(
        "the machine's limit cannot be measured", sys.executable, "-m", "bench.engine.roofline", str(threads)
    )
    return Limit(**json.loads(line))


def measured(threads: int) -> Limit:
    """Measure the limit in this process."""
    import torch

    torch.set_num_threads(threads)
    with torch.inference_mode():
        ways = {way: POOL_BYTES / seconds / 1e9 for way, seconds in _reads()}
        bfloat16, float32 = _matrix_gflops(torch.bfloat16), _matrix_gflops(torch.float32)
    return Limit(threads, max(ways.values()), bfloat16, float32, ways)


def _reads() -> Iterator[tuple[str, float]]:
    """Yield the seconds to read the pool once, by each method."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        pool = [torch.full((SIDE, SIDE), 0.5, dtype=dtype) for _ in range(POOL_BYTES // (SIDE**2 * dtype.itemsize))]
        yield f"sum {name}", _best(partial(_over, pool, torch.sum))
        inputs = [torch.full((rows, SIDE), 0.5, dtype=dtype) for rows in ROWS]
        for x in inputs:
            yield f"linear {name} {len(x)}", _best(partial(_over, pool, partial(torch.nn.functional.linear, x)))
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            for number, weight in enumerate(pool):  # one by one, so that there are never two pools in memory
                pool[number] = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
            for x in inputs:
                yield f"prepacked {name} {len(x)}", _best(partial(_over, pool, partial(_multiply, x)))


def _over(pool: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> None:
    for weight in pool:
        work(weight)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a linear layer whose weight oneDNN has reordered."""
    import torch

    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _matrix_gflops(kind: dtype) -> float:
    import torch

    a, b = (torch.full((SQUARE, SQUARE), 0.5, dtype=kind) for _ in range(2))
    return 2.0 * SQUARE**3 / _best(lambda: a @ b) / 1e9


def _best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the seconds of the fastest of some rounds, after one that does not count."""
    work()
    fastest = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def read_again(threads: int) -> None:
    """Answer each line of stdin with the reading rate in 10^9 bytes per second, the better of two readings."""
    import torch

    torch.set_num_threads(threads)
    pool = [torch.full((SIDE, SIDE), 0.5) for _ in range(POOL_BYTES // (SIDE**2 * 4))]
    for _ in sys.stdin:
        print(json.dumps(POOL_BYTES / _best(partial(_over, pool, torch.sum), 2) / 1e9), flush=True)


if __name__ == "__main__":
    process_env.set_variables(int(sys.argv[1]))
    if sys.argv[2:] == ["again"]:
        read_again(int(sys.argv[1]))
    else:
        print(json.dumps(asdict(measured(int(sys.argv[1])))))
