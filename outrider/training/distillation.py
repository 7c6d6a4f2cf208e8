"""A training: draw windows, learn from them, and now and then measure and save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.utils import logging

from outrider.core.digest import PHI, mix64
from outrider.engine.engine import Dtype
from outrider.engine.loading import chosen_backend
from outrider.errors import ConfigError
from outrider.training import state as states
from outrider.training.acceptance import Said
from outrider.training.corpus import Heard
from outrider.training.heads import HeadLessons
from outrider.training.lessons import DrafterLessons
from outrider.training.materials import Materials, gather
from outrider.training.measuring import Figures, HeldOut
from outrider.training.pupils import Lessons
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe
from outrider.training.records import Records
from outrider.training.results import write_result
from outrider.training.saving import refuse_to_replace
from outrider.training.schedule import Budget, pace
from outrider.training.windows import Windows

CLIP = 1.0  # of the gradient's norm


@dataclass(frozen=True, slots=True)
class Progress:
    """A training between two steps."""

    step: int
    tokens: int
    seconds: float
    spent: float  # share of the budget, 0 to 1
    left: float  # seconds, at the pace so far
    loss: float  # a mean over what was learned since the last measurement
    measured: Figures | None  # last


class Training:
    """One run of a recipe, from its beginning or from where its folder says that it stands."""

    def __init__(self, recipe: TrainingRecipe, heard: Heard) -> None:
        """Loads, tokenizes and measures what it takes; minutes, for much text or a large target.

        Raises CheckpointError, TokenizerMismatch and ConfigError for what cannot work, before anything long starts.
        """
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        logging.disable_progress_bar()
        self._recipe = recipe
        self._accelerator = Accelerator(cpu=recipe.device == "cpu")
        self._device = self._accelerator.device
        self._budget = Budget(recipe.tokens, None if recipe.minutes is None else 60.0 * recipe.minutes)
        self._kept = recipe.run / "state"
        self.resumed = states.is_kept(self._kept)
        if not self.resumed:
            refuse_to_replace(recipe.output)
        self._precision = precision(recipe, self._device)
        with self._accelerator.main_process_first():  # which tokenizes
            given = self._given = gather(recipe, self._precision, heard)
        self.skipped = given.corpus.skipped  # texts that were not UTF-8

        settings = states.settings_of(recipe, **given.digests, devices=self._accelerator.num_processes)
        self._state = states.read(self._kept, settings) if self.resumed else states.State(settings=settings)
        optimizer = torch.optim.AdamW(
            given.pupil.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self._pupil, self._optimizer = self._accelerator.prepare(given.pupil, optimizer)
        if self.resumed:
            states.restore(self._kept, self._plain, self._optimizer)

        self._lessons = lessons_of(recipe, given, self._device)
        self._windows = Windows(given.corpus.train, recipe.window, recipe.seed)
        self._held_out = self._examination(heard) if self.leads else None
        self._records = Records(recipe.run / "figures.jsonl", self._state.step) if self.leads else None
        self._losses: list[Tensor] = []
        self._loss = math.nan
        self._measured: Figures | None = None
        self._measured_step = -1
        self._saved_step = self._state.step if self.resumed and recipe.output.exists() else -1
        self._saved_at = time.monotonic()

    @property
    def progress(self) -> Progress:
        """Where it stands."""
        state = self._state
        counts = state.tokens, state.seconds
        return Progress(
            state.step, *counts, self._budget.spent(*counts), self._budget.left(*counts), self._loss, self._measured
        )

    def run(self) -> Iterator[Progress]:
        """Trains; a look after every step. It may be left there, for good after `save`.

        Raises CheckpointError when the disk is full; what was saved last is intact.
        """
        self.measure()
        while self.progress.spent < 1.0:
            began = time.monotonic()
            self._learn()
            self._state.seconds += self._agreed(time.monotonic() - began)
            if self._state.step % self._recipe.measure_steps == 0:
                self.measure()
            if self._due():
                self.save()
            yield self.progress
        self.save()
        yield self.progress

    def measure(self) -> None:
        """On what is held out, for `progress` and the run's records; not twice at one step.

        Raises ConfigError when the training has run away, CheckpointError when the disk is full.
        """
        if self._measured_step == self._state.step:
            return
        self._measured_step = self._state.step
        if self._losses:
            self._loss = float(torch.stack(self._losses).mean())
            self._losses.clear()
            if not math.isfinite(self._loss):
                raise ConfigError(
                    f"learning_rate: the loss is no number any more at step {self._state.step}; begin anew with a "
                    f"smaller one than {self._recipe.learning_rate:g}, or a longer --warm-up"
                )
        if self._held_out is not None and self._records is not None:
            self._measured = self._held_out.measure(self._lessons, self._plain)
            self._records.add(self.progress)

    @torch.no_grad()
    def acceptance(self, said: Said) -> float:
        """The pupil's acceptance length on other texts of the target's."""
        return self._lessons.acceptance(self._plain.eval(), said)

    def save(self) -> None:
        """Measures, and keeps where it stands and the pupil as it is; nothing, where that was just done."""
        if self._saved_step == self._state.step:
            return
        self.measure()
        self._saved_step = self._state.step
        self._accelerator.wait_for_everyone()
        if self.leads:
            states.save(self._kept, self._state, self._plain, self._optimizer)
            write_result(
                self._recipe, self._lessons, self._plain, self._given.tokenizer_folder, self._state, self._measured
            )
        self._saved_at = time.monotonic()

    def any_of(self, asked: bool) -> bool:
        """Whether any of the processes that train together was asked to."""
        return self._agreed(float(asked)) > 0.0

    def _learn(self) -> None:
        """One step."""
        recipe, state = self._recipe, self._state
        rate = recipe.learning_rate * pace(state.step, self.progress.spent, recipe.warm_up)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for turn in range(recipe.accumulate):
            last = turn == recipe.accumulate - 1
            with nullcontext() if last else self._accelerator.no_sync(self._pupil):
                loss = self._judge(turn) / recipe.accumulate
                self._accelerator.backward(loss)
            self._losses.append(loss.detach() * recipe.accumulate)
        self._accelerator.clip_grad_norm_(self._pupil.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.step += 1
        state.tokens += recipe.batch * recipe.accumulate * recipe.window * self._accelerator.num_processes

    def _judge(self, turn: int) -> Tensor:
        """The loss of this process's part of a step: some windows, or what the pupil makes of their beginnings."""
        recipe, accelerator = self._recipe, self._accelerator
        number = (self._state.step * recipe.accumulate + turn) * accelerator.num_processes + accelerator.process_index
        torch.manual_seed(mix64(recipe.seed + PHI * (number + 1)) >> 1)  # of dropout, where a model has any
        windows = self._windows.batch(number * recipe.batch, recipe.batch).to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            return self._lessons.loss(self._pupil, self._plain, self._state.step, windows)

    def _due(self) -> bool:
        """Whether it is time to save; all processes say the same."""
        every = self._recipe.save_steps
        by_time = self._agreed(time.monotonic() - self._saved_at) >= 60.0 * self._recipe.save_minutes
        return by_time or (every is not None and self._state.step % every == 0)

    def _agreed(self, value: float) -> float:
        """The mean of what the processes say."""
        if self._accelerator.num_processes == 1:
            return value
        shared: Tensor = self._accelerator.reduce(torch.tensor(value, device=self._device), "mean")
        return float(shared)

    def _examination(self, heard: Heard) -> HeldOut:
        folder, ids = self._given.target_folder, self._given.corpus.held_out
        device = str(self._device) if folder is not None and chosen_backend(folder, "auto") == "native" else "cpu"
        return HeldOut(ids, self._recipe.window, folder, dtype=self._precision, device=device, heard=heard)

    @property
    def _plain(self) -> Any:
        return self._accelerator.unwrap_model(self._pupil)

    @property
    def leads(self) -> bool:
        """Whether this is the process, of all that train together, that measures, saves and speaks."""
        return bool(self._accelerator.is_main_process)


def lessons_of(recipe: TrainingRecipe, given: Materials, device: torch.device) -> Lessons:
    """What the pupil is taught, by a target on that device."""
    target = given.target and given.target.model.to(device)
    if isinstance(recipe, DrafterRecipe):
        return DrafterLessons(recipe, target)
    assert isinstance(recipe, HeadsRecipe)
    return HeadLessons(recipe, given.pupil.shape, target)


def precision(recipe: TrainingRecipe, device: torch.device) -> Dtype:
    """What passes compute in: bfloat16 where the machine multiplies in it. The weights that learn are in float32."""
    if recipe.precision != "auto":
        return recipe.precision
    able = torch.ops.mkldnn._is_mkldnn_bf16_supported() if device.type == "cpu" else torch.cuda.is_bf16_supported()
    return "bfloat16" if able else "float32"
