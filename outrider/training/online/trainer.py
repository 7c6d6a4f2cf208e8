"""Trains a drafter on its target's texts while the cluster serves, and publishes better versions.

A loop of small steps: read new samples, take a step, and at intervals compare the candidate with the version in use on
samples that neither has learned from; publish the candidate if it agrees with the target more often. Its share of a
processor is bounded, and without new samples it does nothing.

Source: Liu et al., "Online Speculative Decoding" (arXiv 2310.07177), but with samples of all positions instead of only
the rejected ones: under shared noise the target distribution of every position is known anyway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from outrider.core.session.training_samples import TOP, TrainingSample
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.checkpoints.model_card import ModelCard, read_card
from outrider.errors import CheckpointError, OutriderError
from outrider.store.redis.client import Client
from outrider.store.registry import Registry
from outrider.store.training_samples import TrainingSampleStore
from outrider.store.versions import PublishedVersions, Versions
from outrider.training.objectives import ObjectiveName
from outrider.training.online.model import RATE, AgreementScore, OnlineModel
from outrider.training.online.replay import ReplayBuffer
from outrider.training.online.version_store import VersionStore

POLL_S = 0.5  # between two reads of Redis
MIN_POSITIONS = 512  # held-back positions that a comparison needs
ERRORS = 1.0  # standard errors by which a candidate must be ahead to be published, and a version behind to be withdrawn
LEAD = 0.002  # share of positions by which it must be ahead or behind, too

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OnlineTrainingConfig:
    """The settings of an online training."""

    model: Path  # the drafter's original checkpoint: version 0
    drafter: str  # the drafters' model name
    target: str  # name of the model whose texts are learned from
    output: Path  # folder of the versions
    share: float = 0.2  # of one processor that the training may use
    objective: ObjectiveName = "agreement"
    rate: float = RATE  # learning rate
    batch: int = 4  # samples in a step
    every: int = 25  # steps between two comparisons


class Trainer:
    """An online training; call `run` once. After a kill at any time, a new one continues from the version in use."""

    def __init__(self, config: OnlineTrainingConfig, redis: Client) -> None:
        """Load the model. Raises CheckpointError if it cannot be trained, ConfigError without `transformers`."""
        self._config = config
        self._digest = read_tokenizer_digest(config.model)
        self._samples = TrainingSampleStore(redis, config.target, self._digest)
        self._versions = Versions(redis, config.drafter)
        self._registry = Registry(redis)
        self._version_store = VersionStore(config.output, self._versions)
        self.replay = ReplayBuffer(np.random.default_rng())
        self.number = 0  # of the version in use
        self.stream_position = "0"  # in Redis's stream of samples
        self.steps = self._tokens = 0
        self._since = 0  # steps since the last comparison
        self.seconds = 0.0
        self._idle_until = 0.0  # monotonic time of the next work
        self._redis_lost = False
        self._thread = ThreadPoolExecutor(1, "training")
        self._candidate, self._in_use = self._begin(config.model)

    async def run(self) -> None:
        """Train until cancelled. While Redis cannot be reached, the training continues with the samples that it has."""
        try:
            while True:
                try:
                    await self._look()
                    self._redis_lost = False
                except OutriderError as error:
                    level = logging.DEBUG if self._redis_lost else logging.WARNING
                    log.log(level, "no new samples can be read: %s", error)
                    self._redis_lost = True
                await self._work()
                await asyncio.sleep(min(POLL_S, max(0.0, self._idle_until - time.monotonic())) or POLL_S)
        finally:
            self._thread.shutdown(wait=True)

    async def _look(self) -> None:
        """Read new samples, and apply decisions about versions."""
        await self._read()
        published = await self._versions.read()
        if self.number > published.latest:  # Redis has lost the version, or could not be reached when it was written
            await self._version_store.announce(self.number)
            return
        await self._settle(published)
        in_use = published.usable[0].number if published.usable else 0
        if in_use != self.number:
            await self._go_on_from(published, in_use)

    async def _read(self) -> None:
        """Add new samples to the replay buffer.

        Samples that an earlier run has learned from are added, too, but not to the token budget.
        """
        noted = self._version_store.stream_position if self.stream_position == "0" else "0"
        while self.stream_position != noted and noted != "0":
            samples, position = await self._samples.after(self.stream_position, until=noted)
            self.replay.add(filter(self._candidate.fits, samples), known=True)
            self.stream_position = position if samples else noted
        samples, self.stream_position = await self._samples.after(self.stream_position)
        self.replay.add(filter(self._candidate.fits, samples))

    async def _settle(self, published: PublishedVersions) -> None:
        """Decide about versions in question, by comparing each with the version before it on the same new samples."""
        for number in published.in_question:
            held = list(self.replay.held_back)
            if number not in published.versions or sum(sample.chosen for sample in held) < MIN_POSITIONS:
                continue  # too few samples; drafters decide
            older = [version for version in published.usable if version.number < number]
            doubted, before = Path(published.versions[number].folder), self._config.model
            if older:
                before = Path(older[0].folder)
            try:
                one, other = await self._do(partial(_scores, doubted, before, held))
            except CheckpointError as error:
                log.warning("version %d cannot be compared here: %s", number, error)
                continue
            lead, error_of_it = one.lead(other)
            words = f"on new texts it agrees {100 * lead:+.1f} points with the target, against the one before"
            if lead < -max(LEAD, ERRORS * error_of_it):
                await self._versions.withdraw(number, words)
                log.warning("version %d is withdrawn: %s", number, words)
            else:
                await self._versions.clear(number, words)
                log.info("version %d stays: %s", number, words)

    async def _go_on_from(self, published: PublishedVersions, number: int) -> None:
        """Start a new candidate from the version in use, which is not the one that the candidate comes from."""
        folder = Path(published.versions[number].folder) if number else self._config.model
        try:
            self._candidate, self._in_use = await self._do(partial(self._begin, folder))
            log.info("training continues from version %d, not from version %d", number, self.number)
        except CheckpointError as error:
            log.warning("training cannot continue from version %d: %s", number, error)
        self.number, self._since = number, 0

    async def _work(self) -> None:
        """Take a step, compare if it is time, and then set the pause that keeps to the share of a processor."""
        if time.monotonic() < self._idle_until:
            return
        began = time.process_time()
        if batch := self.replay.batch(self._config.batch):
            await self._do(lambda: self._candidate.learn(batch, self._in_use))
            self.steps += 1
            self._since += 1
            self._tokens += sum(sample.chosen for sample in batch)
        if self._since >= (self._config.every if batch else 1):  # without a batch, compare after any number of steps
            self._since = 0
            await self._compare()
        spent = time.process_time() - began
        self.seconds += spent
        self._idle_until = time.monotonic() + spent * (1.0 / self._config.share - 1.0)

    async def _compare(self) -> None:
        """Publish the candidate if it agrees with the target more often than the version in use."""
        held = list(self.replay.held_back)
        if sum(sample.chosen for sample in held) < MIN_POSITIONS:
            return
        mine, theirs = await self._do(lambda: (self._candidate.score(held), self._in_use.score(held)))
        lead, error = mine.lead(theirs)
        log.info(
            "step %d: agrees with the target at %.1f %% of %d new positions, version %d at %.1f %%",
            self.steps,
            100 * mine.mean,
            mine.positions.sum(),
            self.number,
            100 * theirs.mean,
        )
        if lead <= max(LEAD, ERRORS * error):
            return
        try:
            await self._publish(mine.mean)
        except (OutriderError, OSError) as problem:
            log.warning("nothing is published for now: %s", problem)

    async def _publish(self, agreed: float) -> None:
        published = await self._versions.read()
        number = 1 + max(self.number, published.latest, *self._version_store.written(), 0)
        card = await self._card(number, agreed)
        await self._do(lambda: self._version_store.write(number, card, self._candidate.save))
        self._in_use = await self._do(lambda: OnlineModel(self._version_store.folder(number)))
        self._version_store.note(self.stream_position)
        self.number = number
        await self._version_store.announce(number)
        log.info("version %d is published, from %d tokens in %.0f s", number, self._tokens, self.seconds)
        await self._version_store.tidy(await self._versions.read())

    async def _card(self, number: int, agreed: float) -> ModelCard:
        before = read_card(self._config.model)
        verifiers = await self._registry.workers("verifier")
        digests = {worker.weights for worker in verifiers if worker.model == self._config.target}
        return ModelCard(
            kind="drafter",
            target=self._config.target,
            target_digest=before.target_digest if before else digests.pop() if len(digests) == 1 else "",
            tokenizer_digest=self._digest.hex(),
            objective=self._config.objective,
            tokens=self._tokens,
            seconds=round(self.seconds, 1),
            version=number,
            settings={"alternatives": TOP, "agreement": round(agreed, 4), "rate": self._config.rate},
        )

    def _begin(self, folder: Path) -> tuple[OnlineModel, OnlineModel]:
        """Return a candidate that starts from a checkpoint, and the checkpoint's model, to compare it with."""
        torch.set_num_threads(1)
        candidate = OnlineModel(folder, objective_name=self._config.objective, rate=self._config.rate)
        return candidate, OnlineModel(folder)

    async def _do(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _scores(doubted: Path, before: Path, held: Sequence[TrainingSample]) -> tuple[AgreementScore, AgreementScore]:
    return OnlineModel(doubted).score(held), OnlineModel(before).score(held)
