"""Trains a drafter on what its target says while it serves, and publishes what is better.

A loop of small steps: read what came, take a step, now and then compare the candidate with the version in use on
examples that neither has learned from, and publish it where it agrees more. The share of a processor that this
takes is bounded, and when there is nothing new there is nothing to do.

Source: Liu et al., "Online Speculative Decoding" (arXiv 2310.07177), with examples of all positions and not of rejected
ones alone: under shared noise a position's target distribution is known anyway.
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

from outrider.core.examples import TOP, Example
from outrider.engine.card import Card, read_card
from outrider.engine.checkpoint import read_tokenizer_digest
from outrider.errors import CheckpointError, OutriderError
from outrider.store.client import Client
from outrider.store.examples import Examples
from outrider.store.registry import Registry
from outrider.store.versions import Published, Versions
from outrider.training.follower import RATE, Follower, Score
from outrider.training.objectives import ObjectiveName
from outrider.training.replay import Replay
from outrider.training.shelf import Shelf

LOOK_S = 0.5  # between two looks at Redis
LEAST = 512  # places held back, before anything is judged by them
ERRORS = 1.0  # standard errors by which a candidate has to be ahead, and a doubted version behind
LEAD = 0.002  # and a share of places

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Course:
    """What is trained, and how."""

    model: Path  # the drafter's own checkpoint: version 0
    drafter: str  # the name that its drafters go by
    target: str  # name of the model whose texts it learns from
    output: Path  # where versions are written
    share: float = 0.2  # of one processor that training may take
    objective: ObjectiveName = "agreement"
    rate: float = RATE  # of learning
    batch: int = 4  # examples in a step
    every: int = 25  # steps between two comparisons


class Trainer:
    """`run` it once. It can be killed at any moment and started again: it goes on from the version in use."""

    def __init__(self, course: Course, redis: Client) -> None:
        """Raises CheckpointError for a model that cannot be trained, ConfigError without `transformers`."""
        self._course = course
        self._digest = read_tokenizer_digest(course.model)
        self._examples = Examples(redis, course.target, self._digest)
        self._versions = Versions(redis, course.drafter)
        self._registry = Registry(redis)
        self._shelf = Shelf(course.output, self._versions)
        self._replay = Replay(np.random.default_rng())
        self._number = 0  # of the version in use
        self._place = "0"  # in the stream
        self._steps = self._tokens = 0
        self._since = 0  # steps since the last comparison
        self._seconds = 0.0
        self._resting = 0.0  # until when
        self._away = False  # whether Redis is
        self._thread = ThreadPoolExecutor(1, "training")
        self._follower, self._in_use = self._begin(course.model)

    async def run(self) -> None:
        """Until cancelled. While Redis is away it goes on with what it has."""
        try:
            while True:
                try:
                    await self._look()
                    self._away = False
                except OutriderError as error:
                    log.log(logging.DEBUG if self._away else logging.WARNING, "nothing new is heard: %s", error)
                    self._away = True
                await self._work()
                await asyncio.sleep(min(LOOK_S, max(0.0, self._resting - time.monotonic())) or LOOK_S)
        finally:
            self._thread.shutdown(wait=True)

    async def _look(self) -> None:
        """Reads what came, and what was decided about versions."""
        await self._read()
        published = await self._versions.read()
        if self._number > published.latest:  # Redis has lost it, or was away when it was written
            await self._shelf.announce(self._number)
            return
        await self._settle(published)
        in_use = published.good[0].number if published.good else 0
        if in_use != self._number:
            await self._go_on_from(published, in_use)

    async def _read(self) -> None:
        """The examples that came. What an earlier run has learned from is at hand, and not learned from once more."""
        noted = self._shelf.place if self._place == "0" else "0"
        while self._place != noted and noted != "0":
            examples, place = await self._examples.after(self._place, until=noted)
            self._replay.add(filter(self._follower.fits, examples), known=True)
            self._place = place if examples else noted
        examples, self._place = await self._examples.after(self._place)
        self._replay.add(filter(self._follower.fits, examples))

    async def _settle(self, published: Published) -> None:
        """Decides about versions that are doubted: that one and the one before read the same new texts."""
        for number in published.in_question:
            held = list(self._replay.held_back)
            if number not in published.versions or sum(example.said for example in held) < LEAST:
                continue  # drafters decide
            older = [version for version in published.good if version.number < number]
            doubted, before = Path(published.versions[number].folder), self._course.model
            if older:
                before = Path(older[0].folder)
            try:
                one, other = await self._do(partial(_scores, doubted, before, held))
            except CheckpointError as error:
                log.warning("version %d is not judged here: %s", number, error)
                continue
            lead, error_of_it = one.lead(other)
            words = f"on new texts it agrees {100 * lead:+.1f} points with the target, against the one before"
            if lead < -max(LEAD, ERRORS * error_of_it):
                await self._versions.withdraw(number, words)
                log.warning("version %d is withdrawn: %s", number, words)
            else:
                await self._versions.clear(number, words)
                log.info("version %d stays: %s", number, words)

    async def _go_on_from(self, published: Published, number: int) -> None:
        """Another version is in use than the one that the candidate comes from."""
        folder = Path(published.versions[number].folder) if number else self._course.model
        try:
            self._follower, self._in_use = await self._do(partial(self._begin, folder))
            log.info("goes on from version %d, not from version %d", number, self._number)
        except CheckpointError as error:
            log.warning("version %d cannot be gone on from: %s", number, error)
        self._number, self._since = number, 0

    async def _work(self) -> None:
        """A step, and a comparison where it is time; then a rest."""
        if time.monotonic() < self._resting:
            return
        began = time.process_time()
        if batch := self._replay.batch(self._course.batch):
            await self._do(lambda: self._follower.learn(batch, self._in_use))
            self._steps += 1
            self._since += 1
            self._tokens += sum(example.said for example in batch)
        if self._since >= (self._course.every if batch else 1):  # with nothing left to learn, also after a few
            self._since = 0
            await self._compare()
        spent = time.process_time() - began
        self._seconds += spent
        self._resting = time.monotonic() + spent * (1.0 / self._course.share - 1.0)

    async def _compare(self) -> None:
        """Publishes the candidate where it agrees more than the version in use."""
        held = list(self._replay.held_back)
        if sum(example.said for example in held) < LEAST:
            return
        mine, theirs = await self._do(lambda: (self._follower.score(held), self._in_use.score(held)))
        lead, error = mine.lead(theirs)
        log.info(
            "step %d: agrees with the target at %.1f %% of %d new places, version %d at %.1f %%",
            self._steps,
            100 * mine.mean,
            mine.places.sum(),
            self._number,
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
        number = 1 + max(self._number, published.latest, *self._shelf.written(), 0)
        card = await self._card(number, agreed)
        await self._do(lambda: self._shelf.write(number, card, self._follower.save))
        self._in_use = await self._do(lambda: Follower(self._shelf.folder(number)))
        self._shelf.note(self._place)
        self._number = number
        await self._shelf.announce(number)
        log.info("version %d is published, from %d tokens in %.0f s", number, self._tokens, self._seconds)
        await self._shelf.tidy(await self._versions.read())

    async def _card(self, number: int, agreed: float) -> Card:
        before = read_card(self._course.model)
        verifiers = await self._registry.workers("verifier")
        digests = {worker.weights for worker in verifiers if worker.model == self._course.target}
        return Card(
            kind="drafter",
            target=self._course.target,
            target_digest=before.target_digest if before else digests.pop() if len(digests) == 1 else "",
            tokenizer_digest=self._digest.hex(),
            objective=self._course.objective,
            tokens=self._tokens,
            seconds=round(self._seconds, 1),
            version=number,
            settings={"alternatives": TOP, "agreement": round(agreed, 4), "rate": self._course.rate},
        )

    def _begin(self, folder: Path) -> tuple[Follower, Follower]:
        """A candidate that begins as a checkpoint, and what that says, to be compared with."""
        torch.set_num_threads(1)
        follower = Follower(folder, objective_name=self._course.objective, rate=self._course.rate)
        return follower, Follower(folder)

    async def _do(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _scores(doubted: Path, before: Path, held: Sequence[Example]) -> tuple[Score, Score]:
    return Follower(doubted).score(held), Follower(before).score(held)
