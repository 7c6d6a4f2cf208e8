"""How good a drafter is on texts that it never learns from: its loss, and how far its drafts would be accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.engine.engine import Dtype
from outrider.engine.loading import load_engine
from outrider.training.acceptance import Said, say
from outrider.training.corpus import Heard, Ids
from outrider.training.pupils import Lessons
from outrider.training.windows import spread

WINDOWS = 16
PROMPTS = 16
PROMPT = 96  # tokens
SAID = 64  # tokens that the target says behind each
TEMPERATURES = (0.0, 1.0)
SEED = 20231011


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured."""

    held_out_loss: float  # of a model in nats a token, of heads what they minimise
    acceptance: Mapping[float, float]  # temperature -> acceptance length; empty without a target

    def by_name(self) -> dict[str, float]:
        """Acceptance lengths, as they are written down."""
        return {f"{temperature:g}": round(length, 4) for temperature, length in self.acceptance.items()}


class HeldOut:
    """Some windows of the held-out text, and what the target says to some of its prompts."""

    def __init__(self, ids: Ids, window: int, target: Path | None, *, dtype: Dtype, device: str, heard: Heard) -> None:
        """The target, a folder, is loaded and says it once, here. Its context holds the window."""
        self._windows = spread(ids, window + 1, WINDOWS)
        self._said: dict[float, Said] = {}
        if target is None:
            return
        answer = min(SAID, window // 2)
        prompts = [prompt.tolist() for prompt in spread(ids, min(PROMPT, window - answer), PROMPTS)]
        rows = len(prompts[0]) + answer
        threads = torch.get_num_threads()
        engine = load_engine(target, dtype=dtype, device=device, slots=len(prompts), rows=rows, threads=threads)
        for done, temperature in enumerate(TEMPERATURES):
            heard("the target answers held-out prompts", done / len(TEMPERATURES))
            self._said[temperature] = say(engine, prompts, temperature=temperature, tokens=answer, seed=SEED)

    @torch.no_grad()
    def measure(self, lessons: Lessons, pupil: Any) -> Figures:
        """Of a pupil, which is as before behind it."""
        training = pupil.training
        pupil.eval()
        try:
            device = next(pupil.parameters()).device
            losses = [lessons.held_out(pupil, window.to(device)) for window in self._windows]
            lengths = {temperature: lessons.acceptance(pupil, said) for temperature, said in self._said.items()}
            return Figures(sum(losses) / len(losses), lengths)
        finally:
            pupil.train(training)
