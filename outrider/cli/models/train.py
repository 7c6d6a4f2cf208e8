"""`outrider train`: trains drafters and heads, and makes tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.command import reported
from outrider.cli.flags import configured, given
from outrider.cli.models.train_online import online

if TYPE_CHECKING:
    from outrider.config import Section

SectionT = TypeVar("SectionT", bound="Section")

train = typer.Typer(help="Train drafters and heads for your target, from text.", no_args_is_help=True)

Recipe = Annotated[Path | None, typer.Option(metavar="FILE", help="A recipe in TOML; flags override its values.")]
DRAFTER = configured("outrider.training.recipe:DrafterRecipe", complete=False)
EAGLE = configured("outrider.training.recipe:HeadsRecipe", complete=False)
MEDUSA = configured("outrider.training.recipe:HeadsRecipe", "kind", "inner", "regression", complete=False)
MLP = configured("outrider.training.recipe:HeadsRecipe", "kind", "regression", complete=False)
TOKENIZER = configured("outrider.training.recipe:TokenizerRecipe", complete=False)

train.command()(online)


@train.command(cls=DRAFTER)
def drafter(context: typer.Context, recipe: Recipe = None) -> None:
    """Distil a small model from a target, to draft for it; without a target, train a model from text alone.

    The command measures on held-out texts: the loss, and the acceptance length of a chain of drafts, at temperature 0
    and 1. When it is interrupted, it saves; the same command continues where it stopped.
    """
    from outrider.training.recipe import DrafterRecipe

    with reported():
        settings = recipe_of(DrafterRecipe, context, recipe)
        from outrider.cli.models.training_progress import run_training

        run_training(settings)


@train.command(cls=MEDUSA)
def medusa(context: typer.Context, recipe: Recipe = None) -> None:
    """Train Medusa heads: one for each of the next tokens, all of them from the target's last hidden state."""
    _train_heads(context, recipe, kind="medusa")


@train.command(cls=MLP)
def mlp(context: typer.Context, recipe: Recipe = None) -> None:
    """Train an MLP speculator: its state starts as the target's hidden state and takes in each drafted token."""
    _train_heads(context, recipe, kind="mlp")


@train.command(cls=EAGLE)
def eagle(context: typer.Context, recipe: Recipe = None) -> None:
    """Train an EAGLE head: one layer that predicts the target's next hidden states."""
    _train_heads(context, recipe)


def _train_heads(context: typer.Context, recipe: Path | None, kind: str | None = None) -> None:
    from outrider.training.recipe import HeadsRecipe

    with reported():
        settings = recipe_of(HeadsRecipe, context, recipe, **({"kind": kind} if kind else {}))
        from outrider.cli.models.training_progress import run_training

        run_training(settings)


@train.command("tokenizer", cls=TOKENIZER)
def tokenizer_(context: typer.Context, recipe: Recipe = None) -> None:
    """Make a byte-level BPE tokenizer from text, for a new family of models."""
    from rich.console import Console

    from outrider.training.recipe import TokenizerRecipe

    with reported():
        settings = recipe_of(TokenizerRecipe, context, recipe)
        with Console(stderr=True).status("making a tokenizer ..."):
            from outrider.training.data.vocabulary import make_tokenizer

            size = make_tokenizer(settings)
    print(f"outrider train: wrote {settings.output}: tokens={size}")


def recipe_of(kind: type[SectionT], context: typer.Context, file: Path | None, /, **fixed: Any) -> SectionT:
    """Return the recipe from its file and the flags. Flags override the file, and `fixed` overrides both.

    Raises ConfigError.
    """
    from outrider.config import parse
    from outrider.training.recipe import read_recipe

    values = read_recipe(file) if file else {}
    return parse(kind, values | given(context) | fixed, str(file or "flags"))
