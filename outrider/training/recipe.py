"""Recipes: all that decides what a training makes. Files and flags alike make these objects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from outrider.config import Section, read_toml
from outrider.hub import hub_name

STDLIB = "stdlib"  # among the texts: Python's standard library


class TextSettings(Section):
    """What is learned from, and what of it is held out."""

    text: tuple[str, ...] = Field(min_length=1)  # files, folders, or the word stdlib: Python's standard library
    pattern: str = "*"  # names of the files to take from folders
    field: str = "text"  # what holds the text in the objects of files that end in .jsonl
    skip_invalid: bool = False  # leave out files that are not UTF-8, instead of ending with an error
    held_out: int = Field(default=4, ge=1, le=50)  # percent of the texts, by a digest of their names


class TokenizerRecipe(TextSettings):
    """A tokenizer from text: byte-level BPE."""

    output: Path  # the folder that gets it
    vocabulary: int = Field(default=4096, ge=257, le=2**20)  # tokens; 257 are the bytes and the end of a text


class TrainingRecipe(TextSettings):
    """What all trainings share: what they make, from whose teaching, and for how long."""

    output: Path  # the folder that gets it; what the training itself keeps is beside it, in FOLDER.run
    target: Path | None = None  # whose speculator: a checkpoint's folder, or ORG/NAME[@REVISION]

    # What is minimised; text: cross-entropy, in which the target has no part.
    objective: Literal["text", "forward-kl", "reverse-kl", "total-variation", "agreement"] = "agreement"
    text_weight: float = Field(default=0.0, ge=0, lt=1)  # share of the text's cross-entropy in the loss
    temperature: float = Field(default=1.0, gt=0, le=10)  # of both models' distributions in the objective

    window: int = Field(default=512, ge=16)  # tokens of a text that are seen together
    batch: int = Field(default=8, ge=1)  # windows of a pass, on each device
    accumulate: int = Field(default=1, ge=1)  # passes of a step
    tokens: int | None = Field(default=None, ge=1)  # how long it takes: that many tokens of text
    minutes: float | None = Field(default=None, gt=0)  # or so long; where both are given, what ends first
    learning_rate: float = Field(default=1e-3, gt=0, lt=1)  # at its highest
    warm_up: int = Field(default=100, ge=0)  # steps until then; it falls with a cosine to a twentieth
    weight_decay: float = Field(default=0.1, ge=0, lt=1)  # of AdamW
    seed: int = Field(default=0, ge=0)  # of random weights, the order of windows, and what is drawn

    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of passes; auto: bfloat16 where the machine has it
    device: Literal["auto", "cpu"] = "auto"  # auto: the accelerators that are there
    threads: int | None = Field(default=None, ge=1)  # on a CPU; None: as many as there are cores
    measure_steps: int = Field(default=200, ge=1)  # between two measurements on what is held out
    save_steps: int | None = Field(default=None, ge=1)  # between two saves; None: by time alone
    save_minutes: float = Field(default=10.0, gt=0)  # between two saves

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.tokens is None and self.minutes is None:
            raise ValueError("tokens or minutes must say how long to train")
        return self

    @property
    def run(self) -> Path:
        """The folder of what the training keeps for itself: ids, its state, and its figures."""
        return self.output.with_name(self.output.name + ".run")


class DrafterRecipe(TrainingRecipe):
    """A drafter that learns from a target, or, with neither a target nor layers of one, a model from text alone."""

    tokenizer: Path | None = None  # a folder with a tokenizer.json, where there is no target; None: the target's

    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()  # start from these of the target's, counted from 0
    start: Path | None = None  # or from this checkpoint, which has the target's tokenizer
    width: int | None = Field(default=None, ge=8)  # or from random weights of a shape: of the residual stream
    depth: int = Field(default=2, ge=1)  # layers of that shape
    heads: int = Field(default=8, ge=1)  # of its attention
    kv_heads: int | None = Field(default=None, ge=1)  # that have keys and values; None: all
    head_dim: int | None = Field(default=None, ge=2)  # of a head; None: width / heads
    ffn: int | None = Field(default=None, ge=8)  # units of its feed-forward; None: 8/3 of the width
    context: int | None = Field(default=None, ge=2)  # its longest text, in tokens; None: the target's, or the window

    # Few, so that there are many steps: drafts that 400,000 tokens teach are a fifth longer than in steps of 8 windows.
    batch: int = Field(default=2, ge=1)  # windows of a pass, on each device

    on_policy: float = Field(default=0.0, ge=0, le=1)  # share of the steps whose text the drafter itself goes on with
    continuation: int = Field(default=64, ge=1)  # tokens of a window that it says there

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.target is None and self.objective != "text":
            raise ValueError(f"objective {self.objective} needs a target; give one, or the objective text")
        if (self.target is None) == (self.tokenizer is None):
            raise ValueError("give either a target, whose tokenizer is taken, or a tokenizer")
        if sum((bool(self.layers), self.start is not None, self.width is not None)) != 1:
            raise ValueError("give one of layers of the target, start (a checkpoint) and width (a shape)")
        if self.layers and self.target is None:
            raise ValueError("layers are those of a target; give one")
        if self.on_policy and self.objective == "text":
            raise ValueError("on_policy: what the drafter says is judged by a target; give another objective")
        if self.on_policy and self.continuation >= self.window:
            raise ValueError(f"continuation: must be below the window ({self.window}), and leave some text before it")
        return self


class HeadsRecipe(TrainingRecipe):
    """Heads on a target, which itself stays as it is."""

    target: Path  # a checkpoint's folder, or ORG/NAME[@REVISION]
    kind: Literal["medusa", "mlp", "eagle", "eagle-3"] = "eagle-3"  # see outrider.engine.heads
    depth: int = Field(default=4, ge=1, le=16)  # tokens below a root that they guess at most
    own_head: bool = False  # an unembedding of their own; else the target's
    inner: int | None = Field(default=None, ge=8)  # of an MLP's state, or units of EAGLE's feed-forward
    decay: float = Field(default=0.8, gt=0, le=1)  # weight of a depth's loss, of the one before
    regression: float | None = Field(default=None, ge=0)  # weight of what keeps EAGLE-1 near the target's features

    window: int = Field(default=256, ge=16)  # tokens of a text that are seen together

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.depth + 2 > self.window // 2:
            raise ValueError(f"window: {self.window} is too small for {self.depth} tokens below a root")
        return self


def read_recipe(file: Path) -> dict[str, Any]:
    """What a recipe's TOML says, to be parsed with what comes before it. Relative paths are relative to the file; what
    is none and looks like ORG/NAME is on the hub. Raises ConfigError."""
    values, base = read_toml(file), file.resolve().parent
    for key in ("output", "tokenizer", "target", "start"):
        if isinstance(given := values.get(key), str) and not (key in ("target", "start") and hub_name(given, base)):
            values[key] = str(base / given)
    if isinstance(sources := values.get("text"), list):
        values["text"] = [source if source == STDLIB else str(base / str(source)) for source in sources]
    return values
