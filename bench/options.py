"""What a run measures, and on what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig, parse
from outrider.core.contract import RuleName

Drafts = Literal["model", "prompt-lookup", "suffix", "retrieval"]

SEED = 2024  # of the first prompt; the others count up


class Suite(StrEnum):
    """What can be measured."""

    ROWS = "rows"
    LOAD = "load"
    DISTANCE = "distance"
    PASSES = "passes"
    TIERS = "tiers"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of a run."""

    suites: tuple[Suite, ...]
    targets: tuple[int, ...]  # parameters to pad the target to
    temperatures: tuple[float, ...]
    short: tuple[tuple[str, str], ...]  # (id, prompt)
    fresh: tuple[tuple[str, str], ...]  # likewise, of the row suite: some for each repetition, and one to warm up
    long: tuple[tuple[str, str], ...]  # likewise, for the load suite alone
    repetitions: int
    max_tokens: int
    dtype: Literal["float32", "bfloat16"]
    threads: int  # of the rows that are not ours, and for the limit
    router: Mapping[str, Any]  # keys of the cluster's sections that differ from their defaults
    verifier: Mapping[str, Any]
    drafter: Mapping[str, Any]
    rules: tuple[RuleName, ...]  # of acceptance: a row of each beside shared noise
    drafts: tuple[Drafts, ...]  # drafters without a model: a row of each
    learning_tokens: int  # that each of these rows says at each temperature before it is measured
    models: Path
    peers: Mapping[str, Path]
    llama_cpp: bool  # whether to measure it too
    profiled_steps: int  # of a row whose steps' times are asked for
    callers: tuple[int, ...]  # load suite
    load_s: float
    ramp_s: float
    round_trips_ms: tuple[float, ...]  # distance suite

    def cluster(
        self, target: Path, *, slots: int = 2, via: str | None = None, drafts: Drafts = "model"
    ) -> ClusterConfig:
        """One verifier with `target`, one drafter, one router. Raises ConfigError naming a key that is wrong."""
        fixed = {"slots": slots, "dtype": self.dtype}
        return ClusterConfig(
            router=parse(
                RouterConfig,
                {"listen": "127.0.0.1:0", "models": {"target": target}, **self.router},
                "--router",
            ),
            verifier=[
                parse(
                    VerifierConfig,
                    {"model": target, "name": "target", **fixed, **self.verifier},
                    "--verifier",
                )
            ],
            drafter=[
                parse(
                    DrafterConfig,
                    {"model": self.models / "drafter", "via": via, "drafts": drafts, **fixed, **self.drafter},
                    "--drafter",
                )
            ],
        )


def parameters_of(folder: Path) -> int:
    """How many a checkpoint has. Raises CheckpointError."""
    from outrider.engine.checkpoint import read_config
    from outrider.engine.padding import Shape, count_parameters

    config = read_config(folder)
    return count_parameters(config, Shape.of(config))


@asynccontextmanager
async def padded(options: Options, parameters: int, model: str = "target") -> AsyncIterator[Path]:
    """A reference model, padded: it costs like a model of that size and says what the small one says. One that has that
    size is taken as it is."""
    from outrider.engine.padding import pad_checkpoint

    if parameters == parameters_of(options.models / model):
        yield options.models / model
        return
    with TemporaryDirectory(prefix="outrider-bench-") as folder:
        larger = Path(folder) / model
        await asyncio.to_thread(pad_checkpoint, options.models / model, larger, parameters=parameters)
        yield larger
