"""The training loop: it draws windows, learns from them, and measures and saves at intervals."""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.utils import logging

from outrider.core.session.digest import PHI, mix64
from outrider.engine.interface.engine import Dtype
from outrider.engine.loading import chosen_backend
from outrider.errors import ConfigError
from outrider.training.answers.answer_batches import AnswerBatches, learned_and_held_out
from outrider.training.data.corpus import OnProgress
from outrider.training.data.windows import Windows
from outrider.training.evaluation import ANSWERS, Evaluation, HeldOut, HeldOutAnswers, HeldOutData
from outrider.training.expected_gain import ExpectedGain, expected_gain
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe
from outrider.training.saving import state as states
from outrider.training.saving.atomic_save import refuse_to_replace
from outrider.training.saving.records import TrainingProgress, TrainingRecords
from outrider.training.saving.results import write_result
from outrider.training.schedule import TrainingBudget, rate_factor
from outrider.training.setup import TrainingSetup, gather
from outrider.training.tasks.answers_task import AnswersTask
from outrider.training.tasks.drafter_task import DrafterTask
from outrider.training.tasks.heads_task import HeadsTask
from outrider.training.tasks.task import TrainingBatches, TrainingTask

CLIP = 1.0  # of the gradient's norm


class Training:
    """One run of a recipe, from its beginning or from the state in its folder."""

    def __init__(self, recipe: TrainingRecipe, on_progress: OnProgress) -> None:
        """Load the models, tokenize the texts and generate the target's answers. This takes minutes for much text or a
        large target.

        Raises CheckpointError, TokenizerMismatch and ConfigError for recipes that cannot work, before anything long
        starts.
        """
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        logging.disable_progress_bar()
        self._recipe = recipe
        self._accelerator = Accelerator(cpu=recipe.device == "cpu")
        self._device = self._accelerator.device
        self._budget = TrainingBudget(recipe.tokens, recipe.learning_seconds)
        self._state_folder = recipe.run / "state"
        self.resumed = states.is_kept(self._state_folder)
        if not self.resumed:
            refuse_to_replace(recipe.output)
        self._precision = precision(recipe, self._device)
        with self._accelerator.main_process_first():  # the main process tokenizes
            setup = self._setup = gather(recipe, self._precision, str(self._device), on_progress)
        self.skipped = setup.corpus.skipped if setup.corpus else 0  # texts that were not UTF-8

        settings = states.settings_of(recipe, **setup.digests, devices=self._accelerator.num_processes)
        fresh = states.TrainingState(settings=settings)
        self._state = states.read(self._state_folder, settings) if self.resumed else fresh
        optimizer = torch.optim.AdamW(
            setup.student.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self._student, self._optimizer = self._accelerator.prepare(setup.student, optimizer)
        if self.resumed:
            states.restore(self._state_folder, self.student, self._optimizer)

        self.task, self._batches, held_out = parts_of(recipe, setup, self._device, self._precision)
        self._held_out = held_out(on_progress) if self.leads else None
        self._records = TrainingRecords(recipe.run / "figures.jsonl", self._state.step) if self.leads else None
        self._losses: list[Tensor] = []
        self._loss = math.nan
        self._measured: Evaluation | None = None
        self._measured_step = -1
        self._saved_step = self._state.step if self.resumed and recipe.output.exists() else -1
        self._saved_at = time.monotonic()

    @property
    def progress(self) -> TrainingProgress:
        """The current state of the training."""
        state = self._state
        counts = state.tokens, state.seconds
        return TrainingProgress(
            state.step, *counts, self._budget.spent(*counts), self._budget.left(*counts), self._loss, self._measured
        )

    def run(self) -> Iterator[TrainingProgress]:
        """Train, and yield the progress after every step. The iteration may be left after any step; call `save` before
        leaving it for good.

        Raises CheckpointError when the disk is full; the last save is intact then.
        """
        self.measure()
        while self.progress.spent < 1.0:
            began = time.monotonic()
            self._learn()
            self._state.seconds += self._mean(time.monotonic() - began)
            if self._state.step % self._recipe.measure_steps == 0:
                self.measure()
            if self._due():
                self.save()
            yield self.progress
        self.save()
        yield self.progress

    def measure(self) -> None:
        """Measure on the held-out text, for `progress` and the run's records, at most once for each step.

        Raises ConfigError when the loss has diverged, CheckpointError when the disk is full.
        """
        if self._measured_step == self._state.step:
            return
        self._measured_step = self._state.step
        if self._losses:
            self._loss = float(torch.stack(self._losses).mean())
            self._losses.clear()
        if self._held_out is not None and self._records is not None:
            self._measured = self._held_out.measure(self.student)
            self._records.add(self.progress)

    def expected_gain(self) -> ExpectedGain | None:
        """Return what the written drafter is worth here; None where it was not measured on a target's answers, or the
        target serves elsewhere.
        """
        target, measured = self._setup.target_folder, self._measured
        if target is None or measured is None or not measured.by_chain or self._recipe.teacher is not None:
            return None
        return expected_gain(target, self._recipe.output, measured.by_chain, str(self._device), torch.get_num_threads())

    def save(self) -> None:
        """Measure, and save the training state and the student. Do nothing if this step was saved already."""
        if self._saved_step == self._state.step:
            return
        self.measure()
        self._saved_step = self._state.step
        self._accelerator.wait_for_everyone()
        if self.leads:
            states.save(self._state_folder, self._state, self.student, self._optimizer)
            write_result(
                self._recipe,
                self.task,
                self.student,
                self._setup.tokenizer_folder,
                self._setup.target_folder,
                self._state,
                self._measured,
            )
        self._saved_at = time.monotonic()

    def any_process(self, flag: bool) -> bool:
        """Return whether `flag` is true in any of the processes that train together."""
        return self._mean(float(flag)) > 0.0

    def _learn(self) -> None:
        """Take one step."""
        recipe, state = self._recipe, self._state
        rate = recipe.learning_rate * rate_factor(self.progress.spent, recipe.warm_up)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        numbers = range(
            *(recipe.accumulate * self._accelerator.num_processes * step for step in (state.step, state.step + 1))
        )
        for turn in range(recipe.accumulate):
            last = turn == recipe.accumulate - 1
            with nullcontext() if last else self._accelerator.no_sync(self._student):
                loss = self._part_loss(turn) / recipe.accumulate
                self._accelerator.backward(loss)
            self._losses.append(loss.detach() * recipe.accumulate)
        self._check(self._accelerator.clip_grad_norm_(self._student.parameters(), CLIP))
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.step += 1
        state.tokens += sum(map(self._batches.tokens, numbers))

    def _check(self, norm: Tensor) -> None:
        """Raise ConfigError if the losses of this step or the norm of their gradient are no numbers."""
        whole = bool(torch.stack(self._losses[-self._recipe.accumulate :]).isfinite().all())
        if not self.any_process(not whole or not bool(norm.isfinite())):
            return
        recipe, step = self._recipe, self._state.step + 1
        if self.any_process(not whole):
            raise ConfigError(
                f"learning_rate: the loss is no number any more at step {step}; begin anew with a smaller one than "
                f"{recipe.learning_rate:g}, or a longer --warm-up"
            )
        raise ConfigError(
            f"objective: the gradient is no number at step {step}, although the loss is one; begin anew with another "
            f"one than {recipe.objective}, or with --precision float32"
        )

    def _part_loss(self, turn: int) -> Tensor:
        """Return the loss of this process's part of a step, on windows or on the student's continuations of them."""
        recipe, accelerator = self._recipe, self._accelerator
        number = (self._state.step * recipe.accumulate + turn) * accelerator.num_processes + accelerator.process_index
        torch.manual_seed(mix64(recipe.seed + PHI * (number + 1)) >> 1)  # for dropout, if a model has any
        windows = self._batches.batch(number).to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            return self.task.loss(self._student, self.student, self._state.step, windows)

    def _due(self) -> bool:
        """Return whether it is time to save. All processes return the same answer."""
        every = self._recipe.save_steps
        by_time = self._mean(time.monotonic() - self._saved_at) >= 60.0 * self._recipe.save_minutes
        return by_time or (every is not None and self._state.step % every == 0)

    def _mean(self, value: float) -> float:
        """Return the mean of the processes' values."""
        if self._accelerator.num_processes == 1:
            return value
        shared: Tensor = self._accelerator.reduce(torch.tensor(value, device=self._device), "mean")
        return float(shared)

    @property
    def student(self) -> Any:
        """The model that learns, without what trains it in several processes."""
        return self._accelerator.unwrap_model(self._student)

    @property
    def leads(self) -> bool:
        """Whether this is the main process of those that train together: it measures, saves and prints."""
        return bool(self._accelerator.is_main_process)


Parts = tuple[TrainingTask, TrainingBatches, Callable[[OnProgress], HeldOutData]]


def parts_of(recipe: TrainingRecipe, setup: TrainingSetup, device: torch.device, dtype: Dtype) -> Parts:
    """Return a recipe's task, what it learns from, and what makes that which it is measured on."""
    if setup.corpus is None:
        assert isinstance(recipe, DrafterRecipe)
        return _parts_of_answers(recipe, setup)
    target, corpus = setup.target and setup.target.model.to(device), setup.corpus
    task = DrafterTask(recipe, target) if isinstance(recipe, DrafterRecipe) else _heads_task(recipe, setup, target)
    folder = setup.target_folder
    on_device = folder is not None and chosen_backend(folder, "auto") == "native"

    def held_out(on_progress: OnProgress) -> HeldOutData:
        where = str(device) if on_device else "cpu"
        return HeldOut(task, corpus.held_out, recipe.window, folder, dtype=dtype, device=where, on_progress=on_progress)

    return task, Windows(corpus.train, recipe.window, recipe.seed, recipe.batch), held_out


def _heads_task(recipe: TrainingRecipe, setup: TrainingSetup, target: Any) -> HeadsTask:
    assert isinstance(recipe, HeadsRecipe)
    return HeadsTask(recipe, setup.student.shape, target)


def _parts_of_answers(recipe: DrafterRecipe, setup: TrainingSetup) -> Parts:
    assert setup.answers is not None
    task, store = AnswersTask(recipe, setup.draft_ids), setup.answers.texts
    learned, held_out = learned_and_held_out(len(store), recipe.held_out)
    own, others = (
        AnswerBatches(
            store,
            texts,
            window=recipe.window,
            batch=recipe.batch,
            seed=recipe.seed,
            draft_ids=setup.draft_ids,
        )
        for texts in (learned, held_out)
    )
    questions, categories = setup.answers.questions, setup.answers.categories
    measured = [questions.read(text) for text in range(len(questions))]
    measured = measured or [store.read(text) for text in held_out[:ANSWERS]]
    return task, own, lambda _: HeldOutAnswers(task, measured, categories, others)


def precision(recipe: TrainingRecipe, device: torch.device) -> Dtype:
    """Return the type that passes compute in: bfloat16 if the machine multiplies in it. Trained weights are float32."""
    if recipe.precision != "auto":
        return recipe.precision
    faster = _bfloat16_is_faster() if device.type == "cpu" else torch.cuda.is_bf16_supported()
    return "bfloat16" if faster else "float32"


def _bfloat16_is_faster() -> bool:
    """Measure a product in both types. Where a processor lacks the instructions, torch computes bfloat16 four times
    slower than float32, and says that it is supported.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        one, other = torch.ones(256, 512, dtype=dtype), torch.ones(512, 2048, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(partial(torch.matmul, one, other), number=1, repeat=5))
    return seconds[torch.bfloat16] < seconds[torch.float32]
