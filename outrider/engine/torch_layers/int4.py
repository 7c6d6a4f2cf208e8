"""The shapes of linears that int4 supports: inputs share scales in groups, outputs are computed sixteen at a time."""

from __future__ import annotations

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.errors import ConfigError

GROUP = 32  # inputs that share a scale; 64 was measured no faster, and is less exact
OUTPUTS = 16  # kernels need a multiple of this many outputs


def check_int4_shape(config: ModelConfig) -> None:
    """Raise ConfigError where a model has linears whose shapes int4 does not support."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for outputs, inputs in (
        (queries + 2 * keys, config.width),
        (config.width, queries),
        (2 * config.ffn, config.width),
        (config.width, config.ffn),
    ):
        check_int4(outputs, inputs)


def check_int4(outputs: int, inputs: int) -> None:
    """Raise ConfigError where int4 does not support a linear of that shape."""
    if inputs % GROUP or outputs % OUTPUTS:
        raise ConfigError(
            f"dtype: int4 needs linears of a multiple of {GROUP} inputs and {OUTPUTS} outputs, and this model has "
            f"one of {inputs} inputs and {outputs} outputs; use int8"
        )
