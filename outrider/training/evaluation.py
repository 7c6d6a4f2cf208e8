"""Evaluates a drafter on held-out texts: its loss, and the acceptance length of its drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from outrider.engine.interface.engine import Dtype
from outrider.engine.loading import load_engine
from outrider.training.acceptance import GAMMA, TargetTexts, committed, generate_texts
from outrider.training.data.corpus import Ids, OnProgress
from outrider.training.data.windows import spread
from outrider.training.tasks.answers_task import AnswersTask

if TYPE_CHECKING:
    from outrider.training.answers.answer_batches import AnswerBatches
    from outrider.training.answers.answer_store import TargetAnswer
    from outrider.training.tasks.task import TextTask

WINDOWS = 16
PROMPTS = 16
PROMPT = 96  # tokens
ANSWER = 64  # tokens that the target generates after each prompt
TEMPERATURES = (0.0, 1.0)
SEED = 20231011
ANSWERS = 48  # of the target, that drafts are held against
BATCHES = 4  # of held-out answers, whose loss is measured


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of a measurement."""

    held_out_loss: float  # of a model: nats per token; of heads: the training loss
    acceptance: Mapping[float, float]  # temperature -> acceptance length; empty without a target
    by_category: Mapping[str, float] = field(default_factory=dict)  # of questions, over all temperatures
    by_chain: tuple[float, ...] = ()  # tokens a step with chains of 1, 2, ... drafts; empty without answers

    def by_name(self) -> dict[str, float]:
        """Return the acceptance lengths by temperature, in the form in which they are recorded."""
        return {f"{temperature:g}": round(length, 4) for temperature, length in self.acceptance.items()}


class HeldOutData(Protocol):
    """What a training is measured on."""

    def measure(self, student: Any) -> Evaluation:
        """Measure a student. Its training mode is restored."""


class HeldOut:
    """Some windows of the held-out text, and the target's answers to some of its prompts."""

    def __init__(
        self,
        task: TextTask,
        ids: Ids,
        window: int,
        target: Path | None,
        *,
        dtype: Dtype,
        device: str,
        on_progress: OnProgress,
    ) -> None:
        """Load the target from its folder and generate the answers, once. Its context must be at least the window."""
        self._task = task
        self._windows = spread(ids, window + 1, WINDOWS)
        self._target_texts: dict[float, TargetTexts] = {}
        if target is None:
            return
        answer = min(ANSWER, window // 2)
        prompts = [prompt.tolist() for prompt in spread(ids, min(PROMPT, window - answer), PROMPTS)]
        rows = len(prompts[0]) + answer
        threads = torch.get_num_threads()
        engine = load_engine(target, dtype=dtype, device=device, slots=len(prompts), rows=rows, threads=threads)
        for done, temperature in enumerate(TEMPERATURES):
            on_progress("the target answers held-out prompts", done / len(TEMPERATURES))
            self._target_texts[temperature] = generate_texts(
                engine, prompts, temperature=temperature, tokens=answer, seed=SEED
            )

    @torch.no_grad()
    def measure(self, student: Any) -> Evaluation:
        """See `HeldOutData`."""
        with evaluated(student):
            device = next(student.parameters()).device
            losses = [self._task.held_out(student, window.to(device)) for window in self._windows]
            lengths = {
                temperature: self._task.acceptance(student, texts) for temperature, texts in self._target_texts.items()
            }
            return Evaluation(sum(losses) / len(losses), lengths)


class HeldOutAnswers:
    """Some of the texts that the target wrote, and the student's drafts for their answers under the same noise."""

    def __init__(
        self, task: AnswersTask, texts: Sequence[TargetAnswer], categories: Sequence[str], batches: AnswerBatches
    ) -> None:
        """`texts`: the target's answers that drafts are compared with; `categories`: of each, or none; `batches`: of
        held-out texts.
        """
        self._task = task
        self._texts = texts
        self._categories = categories or [""] * len(texts)
        self._batches = batches

    @torch.no_grad()
    def measure(self, student: Any) -> Evaluation:
        """See `HeldOutData`."""
        with evaluated(student):
            device = next(student.parameters()).device
            steps, tokens = Counter[float | str](), Counter[float | str]()
            chains = [0] * GAMMA
            losses = [self._task.held_out(student, self._batches.batch(number).to(device)) for number in range(BATCHES)]
            for text, category in zip(self._texts, self._categories, strict=True):
                agreed = self._task.agreed(student, text)
                chains = [so_far + committed(agreed, depth)[0] for depth, so_far in enumerate(chains, 1)]
                done, said = committed(agreed)
                for part in (text.temperature, category):
                    steps[part] += done
                    tokens[part] += said
            lengths = {part: tokens[part] / steps[part] for part in steps}
            return Evaluation(
                sum(losses) / BATCHES,
                {at: lengths[at] for at in sorted({text.temperature for text in self._texts})},
                {name: lengths[name] for name in dict.fromkeys(self._categories) if name},
                tuple(sum(len(text.tokens) - text.answer for text in self._texts) / count for count in chains),
            )


@contextmanager
def evaluated(student: Any) -> Iterator[None]:
    """Have a student in its evaluation mode in the body."""
    training = student.training
    student.eval()
    try:
        yield
    finally:
        student.train(training)
