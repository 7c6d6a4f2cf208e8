"""Which linears int4 can hold: its inputs share scales in groups, its outputs are computed sixteen at a time."""

from __future__ import annotations

from outrider.engine.checkpoint import ModelConfig
from outrider.errors import ConfigError

GROUP = 32  # inputs that share a scale. 64 measured no faster, and less exact
OUTPUTS = 16  # kernels want a multiple


def check_int4_shape(config: ModelConfig) -> None:
    """Raises ConfigError where a model has linears whose inputs or outputs int4 cannot group."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for outputs, inputs in (
        (queries + 2 * keys, config.width),
        (config.width, queries),
        (2 * config.ffn, config.width),
        (config.width, config.ffn),
    ):
        check_int4(outputs, inputs)


def check_int4(outputs: int, inputs: int) -> None:
    """Raises ConfigError for a linear of another shape."""
    if inputs % GROUP or outputs % OUTPUTS:
        raise ConfigError(
            f"dtype: int4 needs linears of a multiple of {GROUP} inputs and {OUTPUTS} outputs, and this model has "
            f"one of {inputs} inputs and {outputs} outputs; use int8"
        )
