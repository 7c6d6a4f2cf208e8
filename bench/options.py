"""The options of a benchmark run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from bench.links import Link
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig, parse
from outrider.core.session.contract import RuleName
from outrider.hub import gguf_stem, is_gguf

Drafts = Literal["model", "prompt-lookup", "suffix", "retrieval"]

SEED = 2024  # of the first prompt; each further prompt has the next number


class BenchSuite(StrEnum):
    """The suites of the benchmark."""

    ROWS = "rows"
    LOAD = "load"
    DISTANCE = "distance"
    PASSES = "passes"
    TIERS = "tiers"
    GPU = "gpu"
    FORMATS = "formats"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Checked options of a run."""

    suites: tuple[BenchSuite, ...]
    targets: tuple[int, ...]  # parameters to pad the target to
    temperatures: tuple[float, ...]
    short: tuple[tuple[str, str], ...]  # (id, prompt)
    fresh: tuple[tuple[str, str], ...]  # (id, prompt) of the suite rows: some for each repetition, and one to warm up
    long: tuple[tuple[str, str], ...]  # (id, prompt) of the suite load
    repetitions: int
    max_tokens: int
    dtype: Literal["float32", "bfloat16"]
    threads: int  # of other engines' rows, and of the limit's measurement
    router: Mapping[str, Any]  # keys of the cluster's sections that differ from their defaults
    verifier: Mapping[str, Any]
    drafter: Mapping[str, Any]
    rules: tuple[RuleName, ...]  # acceptance rules beside shared noise: a row of each
    drafts: tuple[Drafts, ...]  # drafters without a model: a row of each
    learning_tokens: int  # tokens that each of these rows generates at each temperature before it is measured
    models: Path
    peers: Mapping[str, Path]
    llama_cpp: bool  # whether to measure llama.cpp, too
    profiled_steps: int  # of a row whose step times are profiled
    callers: tuple[int, ...]  # suite load
    arms: tuple[str, ...]  # ways of working to pin: a row of each in the suite load
    load_s: float
    ramp_s: float
    links: tuple[Link, ...]  # suite distance
    overlaps: tuple[str, ...]  # of its rows, by name
    gguf: Path | None = None  # suite formats: the model; None: one that is fetched
    formats: tuple[int, ...] = ()  # parameters to pad it to

    def cluster(
        self,
        target: Path,
        *,
        slots: int = 2,
        via: str | None = None,
        drafts: Drafts = "model",
        arm: str = "measured",
        drafter: Path | None = None,
    ) -> ClusterConfig:
        """Return a cluster of a verifier with `target`, a drafter and a router. Raises ConfigError for a wrong key.

        `drafter`: its checkpoint; None: the one of `models`.
        """
        fixed = {"slots": slots, "dtype": "auto" if is_gguf(target) else self.dtype}
        return ClusterConfig(
            router=parse(
                RouterConfig,
                {"listen": "127.0.0.1:0", "models": {"target": target}, **self.router},
                "--router",
            ),
            verifier=[
                parse(
                    VerifierConfig,
                    {"model": target, "name": "target", "arm": arm, **fixed, **self.verifier},
                    "--verifier",
                )
            ],
            drafter=[
                parse(
                    DrafterConfig,
                    {
                        "model": drafter or self.models / "drafter",
                        "via": via,
                        "drafts": drafts,
                        **fixed,
                        **self.drafter,
                    },
                    "--drafter",
                )
            ],
        )


def parameters_of(folder: Path) -> int:
    """How many a checkpoint has. Raises CheckpointError."""
    from outrider.engine.checkpoints.checkpoint import read_config
    from outrider.engine.checkpoints.padding import PaddedShape, count_parameters

    config = read_config(folder)
    return count_parameters(config, PaddedShape.of(config))


@asynccontextmanager
async def padded(options: BenchOptions, parameters: int, model: str = "target") -> AsyncIterator[Path]:
    """Yield a padded reference model: it is as slow as a model of that size and chooses the small model's tokens.

    A model that has that size already is not padded.
    """
    async with padded_model(options.models / model, parameters) as folder:
        yield folder


@asynccontextmanager
async def padded_model(folder: Path, parameters: int) -> AsyncIterator[Path]:
    """Yield a padded checkpoint, as `padded` does."""
    from outrider.engine.checkpoints.padding import pad_checkpoint

    if parameters == parameters_of(folder):
        yield folder
        return
    with TemporaryDirectory(prefix="outrider-bench-") as scratch:
        larger = Path(scratch) / (gguf_stem(folder) if is_gguf(folder) else folder.name)
        await asyncio.to_thread(pad_checkpoint, folder, larger, parameters=parameters)
        yield larger
