"""Recipes: all settings of a training, parsed from files and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from outrider.config import Section, read_toml
from outrider.hub import hub_name

WRITING = 0.4  # share of the minutes in which a target writes, without text
STDLIB = "stdlib"  # name of a text source: Python's standard library


class TextSettings(Section):
    """The texts of a training, and their held-out part."""

    text: tuple[str, ...] = ()  # files, folders, or the word stdlib: Python's standard library
    pattern: str = "*"  # pattern of the file names to read in folders
    field: str = "text"  # field with the text, in the JSON objects of files that end in .jsonl
    skip_invalid: bool = False  # skip files that are not UTF-8, instead of an error
    held_out: int = Field(default=4, ge=1, le=50)  # percent of the texts, by a digest of their names

    @model_validator(mode="after")
    def _of_text(self) -> Self:
        if not self.text and not self._writes:
            raise ValueError("text: give files, folders, or the word stdlib")
        return self

    @property
    def _writes(self) -> bool:
        """Whether a target writes the texts itself."""
        return False


class TokenizerRecipe(TextSettings):
    """A tokenizer from text: byte-level BPE."""

    output: Path  # folder to write the tokenizer to
    vocabulary: int = Field(default=4096, ge=257, le=2**20)  # tokens; 257 are the bytes and the end of a text


class TrainingRecipe(TextSettings):
    """The settings that all trainings share."""

    output: Path  # folder to write the result to; the training's state is beside it, in FOLDER.run
    target: Path | None = None  # the target: a checkpoint's folder, or ORG/NAME[@REVISION]

    # Without text: the target writes what is learned from, with its chat template.
    prompts: Path | None = None  # prompts that it answers: lines, or a .jsonl file with a field `prompt`; None: its own
    teacher: str | None = None  # HOST:PORT of a router whose cluster serves the target and writes; None: this process
    answers: int = Field(default=4_000_000, ge=1)  # tokens that it writes; at most 40 % of the minutes
    answer: int = Field(default=256, ge=16)  # tokens of an answer at most

    # The loss; text: cross-entropy of the text, without the target.
    objective: Literal["text", "forward-kl", "reverse-kl", "total-variation", "agreement"] = "agreement"
    text_weight: float = Field(default=0.0, ge=0, lt=1)  # share of the text's cross-entropy in the loss
    temperature: float = Field(default=1.0, gt=0, le=10)  # of both models' distributions in the objective

    window: int = Field(default=512, ge=16)  # tokens of a training window
    batch: int = Field(default=8, ge=1)  # windows of a pass, on each device
    accumulate: int = Field(default=1, ge=1)  # passes of a step
    tokens: int | None = Field(default=None, ge=1)  # tokens of text to train on
    minutes: float | None = Field(default=None, gt=0)  # minutes to train; with both, the first limit ends the training
    learning_rate: float = Field(default=1e-3, gt=0, lt=1)  # the highest learning rate
    warm_up: float = Field(default=0.03, ge=0, lt=1)  # share of tokens or minutes until the highest rate is reached
    weight_decay: float = Field(default=0.1, ge=0, lt=1)  # of AdamW
    seed: int = Field(default=0, ge=0)  # of random weights, the order of windows, and what is drawn

    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of passes; auto: bfloat16 where it is faster
    device: Literal["auto", "cpu"] = "auto"  # auto: all accelerators
    threads: int | None = Field(default=None, ge=1)  # on a CPU; None: one for each core
    measure_steps: int = Field(default=200, ge=1)  # steps between two measurements on the held-out text
    save_steps: int | None = Field(default=None, ge=1)  # steps between two saves; None: by time alone
    save_minutes: float = Field(default=10.0, gt=0)  # minutes between two saves

    @property
    def _writes(self) -> bool:
        return self.target is not None and self.objective != "text"

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.tokens is None and self.minutes is None:
            raise ValueError("tokens or minutes must say how long to train")
        if self.text and self.prompts is not None:
            raise ValueError("prompts: are answered where no text is given; leave out text")
        if self.text and self.teacher is not None:
            raise ValueError("teacher: writes where no text is given; leave out text")
        return self

    @property
    def learning_seconds(self) -> float | None:
        """The seconds in which the student learns: all but those in which a target writes; None: no limit."""
        return None if self.minutes is None else 60.0 * self.minutes * (1.0 if self.text else 1.0 - WRITING)

    @property
    def run(self) -> Path:
        """The folder of the training's own files: token ids, state, and records."""
        return self.output.with_name(self.output.name + ".run")


class DrafterRecipe(TrainingRecipe):
    """A drafter that learns from a target, or, without a target, a model that learns from text alone."""

    tokenizer: Path | None = None  # folder with a tokenizer.json, if there is no target; None: the target's tokenizer

    # Start from these layers of the target, counted from 0; by default, without text, from the first two and the last.
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    start: Path | None = None  # or start from this checkpoint, which has the target's tokenizer
    # Or start from random weights, with this width of the residual stream.
    width: int | None = Field(default=None, ge=8)
    depth: int = Field(default=2, ge=1)  # layers, with `width`
    heads: int = Field(default=8, ge=1)  # attention heads, with `width`
    kv_heads: int | None = Field(default=None, ge=1)  # heads that have keys and values; None: all
    head_dim: int | None = Field(default=None, ge=2)  # dimensions of a head; None: width / heads
    ffn: int | None = Field(default=None, ge=8)  # units of the feed-forward; None: 8/3 of the width
    context: int | None = Field(default=None, ge=2)  # in tokens; None: the target's, or the window

    # Few windows, so that there are many steps: after 400,000 tokens accepted drafts are a fifth longer than with 8.
    batch: int = Field(default=2, ge=1)  # windows of a pass, on each device

    questions: Path | None = None  # as `prompts`, also with a field `category`: drafts are measured on their answers

    # Ids of the head: those that the target writes most often. None: 8,192 of four times as many or more, else all.
    draft_vocabulary: int | None = Field(default=None, ge=16)

    # One row of the embedding for all ids that are not drafted: a smaller file of a drafter that knows less.
    shared_row: bool = False

    # Share of the steps in which the drafter itself continues the text.
    on_policy: float = Field(default=0.0, ge=0, le=1)
    continuation: int = Field(default=64, ge=1)  # tokens that the drafter generates in such a step

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.target is None and self.objective != "text":
            raise ValueError(f"objective {self.objective} needs a target; give one, or the objective text")
        if (self.target is None) == (self.tokenizer is None):
            raise ValueError("give either a target, whose tokenizer is taken, or a tokenizer")
        given = sum((bool(self.layers), self.start is not None, self.width is not None))
        if given > 1 or (self.text and not given):
            raise ValueError("give one of layers of the target, start (a checkpoint) and width (a shape)")
        if self.layers and self.target is None:
            raise ValueError("layers are those of a target; give one")
        if self.on_policy and self.objective == "text":
            raise ValueError("on_policy: a target scores the text that the drafter generates; give another objective")
        if self.text and self.questions is not None:
            raise ValueError("questions: are answered where no text is given; leave out text")
        if self.text_weight and not self.text:
            raise ValueError("text_weight: what the target writes is learned from its probabilities; give text")
        if self.text and self.draft_vocabulary is not None:
            raise ValueError(
                "draft_vocabulary: is chosen from what the target writes where no text is given; leave out text"
            )
        if self.shared_row and (self.text or self.width is not None):
            raise ValueError(
                "shared_row: is of an embedding that a target gave, without text; leave out text and width"
            )
        if self.on_policy and not self.text:
            raise ValueError("on_policy: scores of the drafter's own text need the target; give text")
        if self.on_policy and self.continuation >= self.window:
            raise ValueError(f"continuation: must be below the window ({self.window}), and leave some text before it")
        return self


class HeadsRecipe(TrainingRecipe):
    """Heads on a frozen target."""

    target: Path  # a checkpoint's folder, or ORG/NAME[@REVISION]
    kind: Literal["medusa", "mlp", "eagle", "eagle-3"] = "eagle-3"  # see outrider.engine.heads
    depth: int = Field(default=4, ge=1, le=16)  # largest number of tokens below a root that the heads guess
    own_head: bool = False  # train a separate unembedding; else use the target's
    inner: int | None = Field(default=None, ge=8)  # width of an MLP's state, or units of EAGLE's feed-forward
    decay: float = Field(default=0.8, gt=0, le=1)  # weight of a depth's loss, relative to the depth above it
    regression: float | None = Field(default=None, ge=0)  # weight of EAGLE-1's regression loss on the target's features

    window: int = Field(default=256, ge=16)  # tokens of a training window

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.depth + 2 > self.window // 2:
            raise ValueError(f"window: {self.window} is too small for {self.depth} tokens below a root")
        return self


def read_recipe(file: Path) -> dict[str, Any]:
    """Return the values in a recipe's TOML file, not parsed yet, because flags may override them.

    Relative paths are relative to the file. A name like ORG/NAME that is not a path there is on the hub. Raises
    ConfigError.
    """
    values, base = read_toml(file), file.resolve().parent
    for key in ("output", "tokenizer", "target", "start", "prompts", "questions"):
        if isinstance(given := values.get(key), str) and not (key in ("target", "start") and hub_name(given, base)):
            values[key] = str(base / given)
    if isinstance(sources := values.get("text"), list):
        values["text"] = [source if source == STDLIB else str(base / str(source)) for source in sources]
    return values
