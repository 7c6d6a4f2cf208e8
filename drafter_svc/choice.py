"""What a drafter that dials takes: of several checkpoints the one that suits the router's targets, and the number of
threads with which a level is fastest here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

from drafter_svc.loading import load_part, trained_for
from outrider.client._connection import Access, resolve
from outrider.config import DrafterConfig
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.threads import run_in_short_lived_thread
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import checkpoint_folder
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.wire import drafter as wire

ANSWERED_S = 30.0  # for the router to answer
ROWS, CONTEXT, REPEATS, WITHIN_S = 8, 256, 5, 2.0  # of the levels that are measured
SHARE = 0.1  # of the target's pass that a level may take
FASTER = 0.85  # of a level's time with half the threads, that twice as many have to reach

log = logging.getLogger(__name__)


class MeasuredModel(NamedTuple):
    """A checkpoint, and what drafting with it takes here."""

    model: Path
    threads: int
    level_s: float
    parameters: int
    pass_s: float  # of the slowest target that it can draft for; 0: not known


async def chosen(config: DrafterConfig) -> DrafterConfig:
    """Return the configuration that a drafter starts with. Raises ConfigError."""
    if config.connect is None or config.drafts != "model" or config.heads is not None:
        return config
    if config.candidates:
        return await asyncio.to_thread(choose, config, await targets_at(config.connect, config.ca))
    if len([*_numbers(config)]) == 1:
        return config  # there is nothing to choose, so nothing is loaded to be measured
    threads, level_s, _ = await asyncio.to_thread(with_threads, config)
    log.info("a level takes %.2f ms with threads = %d", 1e3 * level_s, threads)
    return config.model_copy(update={"threads": threads})


async def targets_at(address: str, ca: Path | None) -> Sequence[wire.DraftTarget]:
    """Return what a router has drafters draft for. Raises ConfigError where it does not say."""
    connection = resolve(address, ca=ca)
    access = Access.of(connection)
    async with open_channel(connection.address, access.tls, access.server_name) as channel:
        ask: Any = channel.unary_unary(wire.TARGETS, wire.TargetsRequest.SerializeToString, wire.TargetList.FromString)
        try:
            answer = await ask(wire.TargetsRequest(), metadata=access.metadata, timeout=ANSWERED_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise ConfigError(f"connect: {connection.address}: {from_rpc_error(error)}") from None
        targets: Sequence[wire.DraftTarget] = answer.targets
        return targets


def choose(config: DrafterConfig, targets: Sequence[wire.DraftTarget]) -> DrafterConfig:
    """Return the configuration with the checkpoint and the threads that suit the targets best.

    The largest model is best whose level takes at most a tenth of the target's pass; if there is none, the one with the
    fastest level. Raises ConfigError if none suits, or none can be loaded.
    """
    found, left_out = [], []
    for model in (config.model, *config.candidates):
        try:
            choice = _measured(config.model_copy(update={"model": model}), targets)
        except (CheckpointError, ConfigError, MemoryError) as error:
            why = str(error) or "takes more memory than there is"
            left_out.append(why if why.startswith(str(model)) else f"{model}: {why}")
            log.warning("left out: %s", left_out[-1])
            continue
        took = 1e3 * choice.level_s, choice.threads, 1e3 * choice.pass_s
        log.info("%s: a level takes %.2f ms with threads = %d; the target's pass takes %.1f ms", model, *took)
        found.append(choice)
    if not found:
        raise ConfigError("; ".join(["candidates: none of them can draft here", *left_out]))
    best = best_of(found)
    log.info("takes %s", best.model)
    return config.model_copy(update={"model": best.model, "threads": best.threads, "candidates": ()})


def best_of(found: Sequence[MeasuredModel]) -> MeasuredModel:
    """Return the choice that is expected to bring most."""
    quick = [it for it in found if it.level_s <= SHARE * it.pass_s]
    return max(quick, key=lambda it: it.parameters) if quick else min(found, key=lambda it: it.level_s)


def with_threads(config: DrafterConfig) -> tuple[int, float, int]:
    """Return the threads with which a level is fastest, the seconds that it takes then, and the model's parameters.

    Raises what `load_part` raises.
    """
    fastest = config.threads, float("inf"), 0
    for threads in _numbers(config):
        alone = {"threads": threads, "slots": 1, "context": CONTEXT + ROWS, "kv_memory": None}
        level_s, parameters = run_in_short_lived_thread(partial(_level, config.model_copy(update=alone)))
        if level_s > FASTER * fastest[1]:
            break
        fastest = threads, level_s, parameters
    return fastest


def _measured(config: DrafterConfig, targets: Sequence[wire.DraftTarget]) -> MeasuredModel:
    pass_s = _pass_s(config, targets)
    return MeasuredModel(config.model, *with_threads(config), pass_s)


def _pass_s(config: DrafterConfig, targets: Sequence[wire.DraftTarget]) -> float:
    """Return the time of the slowest pass among the targets that a checkpoint can draft for.

    Raises ConfigError where there is none, and CheckpointError.
    """
    digest, only = read_tokenizer_digest(checkpoint_folder(config.target or config.model)), trained_for(config)
    same = [it for it in targets if it.tokenizer_digest == digest]
    if not same:
        there = ", ".join(sorted({it.model for it in targets})) or "none"
        raise ConfigError(f"has the tokenizer of no target there ({there}); give --target to draft by text")
    own = [it for it in same if not only or it.weights in ("", only)]
    if not own:
        raise ConfigError("was trained for another target; give --any-target to draft all the same")
    return max(it.pass_us for it in own) / 1e6


def _numbers(config: DrafterConfig) -> Iterator[int]:
    """Yield the numbers of threads to try: the given one, else 1, 2, 4 up to all cores."""
    if "threads" in config.model_fields_set or config.device != "cpu":
        yield config.threads
        return
    threads = 1
    while threads <= (os.cpu_count() or 1):
        yield threads
        threads *= 2


def _level(config: DrafterConfig) -> tuple[float, int]:
    engine = load_part(config)
    costs = engine.measure_costs((ROWS,), CONTEXT, REPEATS, WITHIN_S)
    return costs[-1][1], engine.parameters
