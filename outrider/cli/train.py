"""`outrider train`: drafters, heads, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.reporting import reported
from outrider.cli.train_online import online

if TYPE_CHECKING:
    from outrider.config import Section

SectionT = TypeVar("SectionT", bound="Section")

train = typer.Typer(help="Drafters and heads for your target, from text.", no_args_is_help=True)

Recipe = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A recipe in TOML; what else is given comes before what it says.")
]
Output = Annotated[Path | None, typer.Option(metavar="FOLDER", help="That gets it. Needed, if no recipe names it.")]
Text = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE", help="A file, a folder, or stdlib: Python's library; may be repeated. Needed, as output is."
    ),
]
Pattern = Annotated[str | None, typer.Option(help="Names of the files to take from folders, like '*.md'. [default: *]")]
Field = Annotated[str | None, typer.Option(help="That holds the text in lines of .jsonl files. [default: text]")]
SkipInvalid = Annotated[
    bool | None, typer.Option("--skip-invalid/--no-skip-invalid", help="Leave out files that are not UTF-8.")
]
HeldOut = Annotated[int | None, typer.Option(help="Percent of the texts that nothing is learned from. [default: 4]")]
Objective = Annotated[
    str | None,
    typer.Option(help="agreement, forward-kl, reverse-kl, total-variation, or text alone. [default: agreement]"),
]
TextWeight = Annotated[float | None, typer.Option(help="Share of the text's own loss. [default: 0]")]
Temperature = Annotated[float | None, typer.Option(help="Of both in the objective. [default: 1]")]
Window = Annotated[int | None, typer.Option(help="Tokens seen together. [default: 512, of heads 256]")]
Batch = Annotated[int | None, typer.Option(help="Windows of a pass, on each device. [default: 2, of heads 8]")]
Accumulate = Annotated[int | None, typer.Option(help="Passes of a step. [default: 1]")]
Tokens = Annotated[str | None, typer.Option(metavar="COUNT", help="To train on, like 20M.")]
Minutes = Annotated[float | None, typer.Option(help="Or for how long; with both, what ends first.")]
LearningRate = Annotated[float | None, typer.Option(help="At its highest. [default: 0.001]")]
WarmUp = Annotated[int | None, typer.Option(help="Steps until then. [default: 100]")]
WeightDecay = Annotated[float | None, typer.Option(help="Of AdamW. [default: 0.1]")]
Seed = Annotated[int | None, typer.Option(help="Of all that is random. [default: 0]")]
Precision = Annotated[
    str | None, typer.Option(help="float32, bfloat16, or auto: as the machine is quicker. [default: auto]")
]
Device = Annotated[str | None, typer.Option(help="cpu, or auto: accelerators if any. [default: auto]")]
Threads = Annotated[int | None, typer.Option(help="On a CPU. [default: one for each core]")]
MeasureSteps = Annotated[int | None, typer.Option(help="Between two measurements. [default: 200]")]
SaveSteps = Annotated[int | None, typer.Option(help="Between two saves. [default: by time alone]")]
SaveMinutes = Annotated[float | None, typer.Option(help="Between two saves. [default: 10]")]
HeadsTarget = Annotated[
    Path | None, typer.Option(help="Whose heads: a checkpoint's folder, or ORG/NAME[@REVISION] on the hub. Needed.")
]
Levels = Annotated[int | None, typer.Option(help="Tokens that they guess at most. [default: 4]")]
OwnHead = Annotated[
    bool | None, typer.Option("--own-head/--no-own-head", help="An unembedding of their own. [default: the target's]")
]
Decay = Annotated[float | None, typer.Option(help="Weight of a depth's loss, of the one before. [default: 0.8]")]

train.command()(online)


@train.command()
def drafter(
    context: typer.Context,
    recipe: Recipe = None,
    output: Output = None,
    text: Text = None,
    target: Annotated[
        Path | None, typer.Option(help="Whose drafter: a checkpoint's folder, or ORG/NAME[@REVISION] on the hub.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of its tokenizer.json, where there is no target.")
    ] = None,
    pattern: Pattern = None,
    field: Field = None,
    skip_invalid: SkipInvalid = None,
    held_out: HeldOut = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Start from these layers of the target, counted from 0.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Or from this checkpoint.")] = None,
    width: Annotated[int | None, typer.Option(help="Or from random weights: of the residual stream.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers of that shape. [default: 2]")] = None,
    heads: Annotated[int | None, typer.Option(help="Of its attention. [default: 8]")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="With keys and values. [default: all heads]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Of a head. [default: width / heads]")] = None,
    ffn: Annotated[int | None, typer.Option(help="Units of its feed-forward. [default: 8/3 of the width]")] = None,
    context_tokens: Annotated[
        int | None, typer.Option("--context", help="Its longest text, in tokens. [default: the target's]")
    ] = None,
    objective: Objective = None,
    text_weight: TextWeight = None,
    temperature: Temperature = None,
    on_policy: Annotated[
        float | None, typer.Option(help="Share of steps on what the drafter itself says, 0 to 1. [default: 0]")
    ] = None,
    continuation: Annotated[int | None, typer.Option(help="Tokens that it says there. [default: 64]")] = None,
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
    """Distil a small model from a target, to draft for it; without one, train a model from text alone.

    What it measures is on texts that it does not learn from: the loss, and the acceptance length of a chain of drafts,
    at temperature 0 and 1. Interrupted, it saves; the same command goes on where it stopped.
    """
    from outrider.training.recipe import DrafterRecipe

    with reported():
        settings = recipe_of(DrafterRecipe, context)
        from outrider.cli.training import trained

        trained(settings)


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
    """Train Medusa heads: one for each of the next tokens, all from the target's last hidden state."""
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
    inner: Annotated[int | None, typer.Option(help="Width of its state. [default: the target's]")] = None,
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
    """Train an MLP speculator: a state that begins with the target's and takes in each drafted token."""
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
        typer.Option(help="eagle-3: from three of the target's layers; eagle: from its last. [default: eagle-3]"),
    ] = None,
    inner: Annotated[int | None, typer.Option(help="Units of its feed-forward. [default: the target's]")] = None,
    regression: Annotated[
        float | None, typer.Option(help="Weight of what keeps it near the features. [default: 1 for eagle, else 0]")
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
    """Train an EAGLE head: one layer that goes on in the target's hidden states."""
    _train_heads(context)


def _train_heads(context: typer.Context, kind: str | None = None) -> None:
    from outrider.training.recipe import HeadsRecipe

    with reported():
        settings = recipe_of(HeadsRecipe, context, **({"kind": kind} if kind else {}))
        from outrider.cli.training import trained

        trained(settings)


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
    """Make a tokenizer from text, for a family of models of its own: byte-level BPE."""
    from rich.console import Console

    from outrider.training.recipe import TokenizerRecipe

    with reported():
        settings = recipe_of(TokenizerRecipe, context)
        with Console(stderr=True).status("making a tokenizer ..."):
            from outrider.training.vocabulary import make_tokenizer

            known = make_tokenizer(settings)
    print(f"outrider train: wrote {settings.output}: tokens={known}")


def recipe_of(kind: type[SectionT], context: typer.Context, /, **fixed: Any) -> SectionT:
    """What a recipe's file says, before it what flags say, and before these what is fixed. Raises ConfigError."""
    from outrider.cli.pad import parse_count
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
