"""What a model's linears cost by the type of their weights and the rows of a pass: the suite that compares kernels.

`python -m bench.linears THREADS FOLDER [PARAMETERS]` measures those of a checkpoint, or of what it would be padded to.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.processes import output
from outrider.fleet import surroundings

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.checkpoint import ModelConfig
    from outrider.engine.linear import Linear
    from outrider.engine.model import Dtype

DTYPES: tuple[Dtype, ...] = ("bfloat16", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 32)
MOST_LAYERS = 8  # that are made; a model that has more is larger than any cache already
ROUNDS = 12
STD = 0.02  # of the weights, which are random
HEAD, WHOLE = "head", "a pass"  # the last linear; all linears of all layers and the head together


@dataclass(frozen=True, slots=True)
class Cost:
    """One call of a linear, or all calls of a pass."""

    parameters: int  # of the model, as asked for; 0: the checkpoint's own
    threads: int
    linear: str  # "qkv", "output", "gate_up", "down", "head" or "a pass"
    dtype: str  # of the layers' weights
    rows: int
    microseconds: float
    bytes: int  # of weights that are read

    @property
    def gb_s(self) -> float:
        """10^9 bytes of weights per second."""
        return self.bytes / self.microseconds / 1e3


async def measure(checkpoint: Path, parameters: int, threads: int) -> list[Cost]:
    """The costs, measured in a process of its own. Raises Unavailable when that fails."""
    command = [sys.executable, "-m", "bench.linears", str(threads), str(checkpoint), str(parameters)]
    return [Cost(**entry) for entry in json.loads(await output("linears cannot be measured", *command))]


def measured(checkpoint: Path, parameters: int, threads: int) -> Iterator[Cost]:
    """The costs, measured here, each the fastest of some rounds.

    Linears are called in the order of a pass, so that caches hold what they would. The types take turns, so that
    a busy moment hits all alike, and each begins its turn with a pass that does not count.
    """
    import torch

    torch.set_num_threads(threads)
    config = _padded(checkpoint, parameters)
    with torch.inference_mode():
        models = {dtype: _linears(config, dtype) for dtype in DTYPES}
        fastest: dict[tuple[Dtype, int, str], float] = {}
        for _ in range(ROUNDS):
            for rows in ROWS:
                inputs = {size: torch.randn(rows, size) for size in (config.width, config.ffn, _queries(config))}
                for dtype, layers in models.items():
                    _pass(layers, inputs, config)
                    for name, seconds in _pass(layers, inputs, config).items():
                        fastest[dtype, rows, name] = min(fastest.get((dtype, rows, name), seconds), seconds)
    for (dtype, rows, name), seconds in fastest.items():
        sizes: dict[str, float] = {key: linear.bytes for part in models[dtype] for key, linear in part.items()}
        sizes[WHOLE] = _whole(sizes, config)
        yield Cost(parameters, threads, name, dtype, rows, seconds * 1e6, round(sizes[name]))


def _padded(checkpoint: Path, parameters: int) -> ModelConfig:
    """A checkpoint's shape, or the one that it would be padded to. Raises CheckpointError."""
    from outrider.engine.checkpoint import read_config
    from outrider.engine.padding import choose_shape
    from outrider.errors import CheckpointError

    config = read_config(checkpoint)
    if not parameters:
        return config
    shape = choose_shape(config, parameters)
    if shape is None:
        raise CheckpointError(f"{checkpoint}: has more than {parameters} parameters already")
    kv_heads, heads = shape.kv_heads, shape.kv_heads * config.group
    return replace(config, width=shape.width, layers=shape.layers, ffn=shape.ffn, kv_heads=kv_heads, heads=heads)


def _queries(config: ModelConfig) -> int:
    return config.heads * config.head_dim


def _linears(config: ModelConfig, dtype: Dtype) -> Sequence[Mapping[str, Linear]]:
    """The linears of each layer, in the order of a pass, and the head behind them."""
    import torch

    from outrider.engine.model import HEADS, make_linear

    def linear(outputs: int, inputs: int, kind: Dtype) -> Linear:
        return make_linear(torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(0.0, STD), None, kind)

    width, ffn, queries = config.width, config.ffn, _queries(config)
    sizes = {
        "qkv": (queries + 2 * config.kv_heads * config.head_dim, width),
        "output": (width, queries),
        "gate_up": (2 * ffn, width),
        "down": (width, ffn),
    }
    layers = range(min(config.layers, MOST_LAYERS))
    made = [{name: linear(*size, dtype) for name, size in sizes.items()} for _ in layers]
    return [*made, {HEAD: linear(config.vocabulary, width, HEADS[dtype])}]


def _pass(
    layers: Sequence[Mapping[str, Linear]], inputs: Mapping[int, Tensor], config: ModelConfig
) -> dict[str, float]:
    """Seconds of a call of each linear, the mean over the layers, and of all that a pass calls."""
    inner = {"output": _queries(config), "down": config.ffn}
    spent: dict[str, float] = {}
    for layer in layers:
        for name, linear in layer.items():
            x = inputs[inner.get(name, config.width)]
            began = time.perf_counter()
            linear(x)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
    made = len(layers) - 1
    means = {name: seconds if name == HEAD else seconds / made for name, seconds in spent.items()}
    return means | {WHOLE: _whole(means, config)}


def _whole(each: Mapping[str, float], config: ModelConfig) -> float:
    """What all of a pass takes, of what each linear does."""
    return config.layers * sum(value for name, value in each.items() if name != HEAD) + each[HEAD]


if __name__ == "__main__":
    surroundings.settle(int(sys.argv[1]))
    found = measured(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0, int(sys.argv[1]))
    print(json.dumps([asdict(cost) for cost in found]))
