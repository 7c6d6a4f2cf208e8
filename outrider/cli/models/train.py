"""`outrider train`: trains drafters and heads, and makes tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.command import reported
from outrider.cli.models.train_online import online

if TYPE_CHECKING:
    from outrider.config import Section

SectionT = TypeVar("SectionT", bound="Section")

train = typer.Typer(help="Train drafters and heads for your target, from text.", no_args_is_help=True)

Recipe = Annotated[Path | None, typer.Option(metavar="FILE", help="A recipe in TOML; flags override its values.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder to write the result to. Required unless a recipe sets it.")
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE",
        help="A file, a folder, or stdlib: Python's library; may be repeated. Required unless a recipe sets it.",
    ),
]
Pattern = Annotated[
    str | None, typer.Option(help="Pattern of the file names to read in folders, like '*.md'. [default: *]")
]
Field = Annotated[str | None, typer.Option(help="Field with the text in lines of .jsonl files. [default: text]")]
SkipInvalid = Annotated[
    bool | None, typer.Option("--skip-invalid/--no-skip-invalid", help="Skip files that are not UTF-8.")
]
HeldOut = Annotated[int | None, typer.Option(help="Percent of the texts that are held out. [default: 4]")]
Objective = Annotated[
    str | None,
    typer.Option(help="agreement, forward-kl, reverse-kl, total-variation, or text alone. [default: agreement]"),
]
TextWeight = Annotated[float | None, typer.Option(help="Share of the text's cross-entropy in the loss. [default: 0]")]
Temperature = Annotated[float | None, typer.Option(help="Of both distributions in the objective. [default: 1]")]
Window = Annotated[int | None, typer.Option(help="Tokens of a training window. [default: 512, of heads 256]")]
Batch = Annotated[int | None, typer.Option(help="Windows of a pass, on each device. [default: 2, of heads 8]")]
Accumulate = Annotated[int | None, typer.Option(help="Passes of a step. [default: 1]")]
Tokens = Annotated[str | None, typer.Option(metavar="COUNT", help="Tokens to train on, like 20M.")]
Minutes = Annotated[float | None, typer.Option(help="Minutes to train; with --tokens, the first limit ends it.")]
LearningRate = Annotated[float | None, typer.Option(help="Highest learning rate. [default: 0.001]")]
WarmUp = Annotated[int | None, typer.Option(help="Steps until the highest learning rate. [default: 100]")]
WeightDecay = Annotated[float | None, typer.Option(help="Weight decay of AdamW. [default: 0.1]")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random. [default: 0]")]
Precision = Annotated[
    str | None, typer.Option(help="float32, bfloat16, or auto: the faster one on this machine. [default: auto]")
]
Device = Annotated[str | None, typer.Option(help="cpu, or auto: accelerators if any. [default: auto]")]
Threads = Annotated[int | None, typer.Option(help="Threads on a CPU. [default: one for each core]")]
MeasureSteps = Annotated[int | None, typer.Option(help="Steps between two measurements. [default: 200]")]
SaveSteps = Annotated[int | None, typer.Option(help="Steps between two saves. [default: by time alone]")]
SaveMinutes = Annotated[float | None, typer.Option(help="Minutes between two saves. [default: 10]")]
HeadsTarget = Annotated[
    Path | None,
    typer.Option(help="Target of the heads: a checkpoint's folder, or ORG/NAME[@REVISION] on the hub. Required."),
]
Levels = Annotated[int | None, typer.Option(help="Largest number of tokens that the heads guess. [default: 4]")]
OwnHead = Annotated[
    bool | None,
    typer.Option("--own-head/--no-own-head", help="Train a separate unembedding. [default: use the target's]"),
]
Decay = Annotated[
    float | None, typer.Option(help="Weight of a depth's loss, relative to the depth above it. [default: 0.8]")
]

train.command()(online)


@train.command()
def drafter(
    context: typer.Context,
    recipe: Recipe = None,
    output: Output = None,
    text: Text = None,
    target: Annotated[
        Path | None,
        typer.Option(help="Target of the drafter: a checkpoint's folder, or ORG/NAME[@REVISION] on the hub."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with a tokenizer.json, if there is no target.")
    ] = None,
    pattern: Pattern = None,
    field: Field = None,
    skip_invalid: SkipInvalid = None,
    held_out: HeldOut = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Start from these layers of the target, counted from 0.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Start from this checkpoint instead.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Start from random weights instead, with a residual stream of this width.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Number of layers, with --width. [default: 2]")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, with --width. [default: 8]")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Heads that have keys and values, with --width. [default: all heads]")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Dimensions of a head, with --width. [default: width / heads]")
    ] = None,
    ffn: Annotated[
        int | None, typer.Option(help="Units of the feed-forward, with --width. [default: 8/3 of the width]")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option("--context", help="Context, in tokens. [default: the target's]")
    ] = None,
    objective: Objective = None,
    text_weight: TextWeight = None,
    temperature: Temperature = None,
    on_policy: Annotated[
        float | None,
        typer.Option(help="Share of steps on text that the drafter itself generates, 0 to 1. [default: 0]"),
    ] = None,
    continuation: Annotated[
        int | None, typer.Option(help="Tokens that the drafter generates in such a step. [default: 64]")
    ] = None,
    window: Window = None,
    batch: Batch = None,
    accumulate: Accumulate = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    warm_up: WarmUp = None,
    weight_decay: WeightDecay = None,
    seed: Seed = None,
    precision: Precision = None,
    device: Device = None,
    threads: Threads = None,
    measure_steps: MeasureSteps = None,
    save_steps: SaveSteps = None,
    save_minutes: SaveMinutes = None,
) -> None:
    """Distil a small model from a target, to draft for it; without a target, train a model from text alone.

    The command measures on held-out texts: the loss, and the acceptance length of a chain of drafts, at temperature 0
    and 1. When it is interrupted, it saves; the same command continues where it stopped.
    """
    from outrider.training.recipe import DrafterRecipe

    with reported():
        settings = recipe_of(DrafterRecipe, context)
        from outrider.cli.models.training_progress import run_training

        run_training(settings)


@train.command()
def medusa(
    context: typer.Context,
    recipe: Recipe = None,
    output: Output = None,
    text: Text = None,
    target: HeadsTarget = None,
    pattern: Pattern = None,
    field: Field = None,
    skip_invalid: SkipInvalid = None,
    held_out: HeldOut = None,
    depth: Levels = None,
    own_head: OwnHead = None,
    objective: Objective = None,
    text_weight: TextWeight = None,
    temperature: Temperature = None,
    decay: Decay = None,
    window: Window = None,
    batch: Batch = None,
    accumulate: Accumulate = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    warm_up: WarmUp = None,
    weight_decay: WeightDecay = None,
    seed: Seed = None,
    precision: Precision = None,
    device: Device = None,
    threads: Threads = None,
    measure_steps: MeasureSteps = None,
    save_steps: SaveSteps = None,
    save_minutes: SaveMinutes = None,
) -> None:
    """Train Medusa heads: one for each of the next tokens, all of them from the target's last hidden state."""
    _train_heads(context, kind="medusa")


@train.command()
def mlp(
    context: typer.Context,
    recipe: Recipe = None,
    output: Output = None,
    text: Text = None,
    target: HeadsTarget = None,
    pattern: Pattern = None,
    field: Field = None,
    skip_invalid: SkipInvalid = None,
    held_out: HeldOut = None,
    depth: Levels = None,
    own_head: OwnHead = None,
    inner: Annotated[int | None, typer.Option(help="Width of the state. [default: the target's]")] = None,
    objective: Objective = None,
    text_weight: TextWeight = None,
    temperature: Temperature = None,
    decay: Decay = None,
    window: Window = None,
    batch: Batch = None,
    accumulate: Accumulate = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    warm_up: WarmUp = None,
    weight_decay: WeightDecay = None,
    seed: Seed = None,
    precision: Precision = None,
    device: Device = None,
    threads: Threads = None,
    measure_steps: MeasureSteps = None,
    save_steps: SaveSteps = None,
    save_minutes: SaveMinutes = None,
) -> None:
    """Train an MLP speculator: its state starts as the target's hidden state and takes in each drafted token."""
    _train_heads(context, kind="mlp")


@train.command()
def eagle(
    context: typer.Context,
    recipe: Recipe = None,
    output: Output = None,
    text: Text = None,
    target: HeadsTarget = None,
    pattern: Pattern = None,
    field: Field = None,
    skip_invalid: SkipInvalid = None,
    held_out: HeldOut = None,
    depth: Levels = None,
    own_head: OwnHead = None,
    kind: Annotated[
        str | None,
        typer.Option(help="eagle-3 reads three of the target's layers, eagle reads the last. [default: eagle-3]"),
    ] = None,
    inner: Annotated[int | None, typer.Option(help="Units of the feed-forward. [default: the target's]")] = None,
    regression: Annotated[
        float | None,
        typer.Option(help="Weight of the regression loss on the target's features. [default: 1 for eagle, else 0]"),
    ] = None,
    objective: Objective = None,
    text_weight: TextWeight = None,
    temperature: Temperature = None,
    decay: Decay = None,
    window: Window = None,
    batch: Batch = None,
    accumulate: Accumulate = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    warm_up: WarmUp = None,
    weight_decay: WeightDecay = None,
    seed: Seed = None,
    precision: Precision = None,
    device: Device = None,
    threads: Threads = None,
    measure_steps: MeasureSteps = None,
    save_steps: SaveSteps = None,
    save_minutes: SaveMinutes = None,
) -> None:
    """Train an EAGLE head: one layer that predicts the target's next hidden states."""
    _train_heads(context)


def _train_heads(context: typer.Context, kind: str | None = None) -> None:
    from outrider.training.recipe import HeadsRecipe

    with reported():
        settings = recipe_of(HeadsRecipe, context, **({"kind": kind} if kind else {}))
        from outrider.cli.models.training_progress import run_training

        run_training(settings)


@train.command("tokenizer")
def tokenizer_(
    context: typer.Context,
    recipe: Recipe = None,
    output: Output = None,
    text: Text = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens, 257 or more. [default: 4096]")] = None,
    pattern: Pattern = None,
    field: Field = None,
    skip_invalid: SkipInvalid = None,
    held_out: HeldOut = None,
) -> None:
    """Make a byte-level BPE tokenizer from text, for a new family of models."""
    from rich.console import Console

    from outrider.training.recipe import TokenizerRecipe

    with reported():
        settings = recipe_of(TokenizerRecipe, context)
        with Console(stderr=True).status("making a tokenizer ..."):
            from outrider.training.data.vocabulary import make_tokenizer

            size = make_tokenizer(settings)
    print(f"outrider train: wrote {settings.output}: tokens={size}")


def recipe_of(kind: type[SectionT], context: typer.Context, /, **fixed: Any) -> SectionT:
    """Return the recipe from its file and the flags. Flags override the file, and `fixed` overrides both.

    Raises ConfigError.
    """
    from outrider.cli.command import parse_count
    from outrider.config import parse
    from outrider.training.recipe import read_recipe

    flags: dict[str, Any] = {name: value for name, value in context.params.items() if value not in (None, ())}
    file = flags.pop("recipe", None)
    if "context_tokens" in flags:
        flags["context"] = flags.pop("context_tokens")
    if "layers" in flags:
        flags["layers"] = [layer.strip() for layer in flags["layers"].split(",")]
    if "tokens" in flags:
        flags["tokens"] = parse_count(flags["tokens"])
    values = read_recipe(file) if file else {}
    return parse(kind, values | flags | fixed, str(file or "flags"))
