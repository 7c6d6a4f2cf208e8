"""`make bench-drafters`: what training brings, by acceptance length on prompts that no training has seen.

Drafters of one shape, from the same weights, over the same windows of text, by each objective; heads on the target
beside them, by the nodes of a tree; and a drafter that learns while it serves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, NamedTuple, get_args

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.online import LAYERS
from bench.trees.cells import Setting
from bench.trees.running import run as run_trees
from bench.trees.tables import print_tables
from outrider.cli.load import read_prompts
from outrider.cli.pad import parse_count
from outrider.cli.reporting import reported
from outrider.engine.heads.shape import Kind
from outrider.engine.loading import load_engine
from outrider.fleet import surroundings
from outrider.training.acceptance import say
from outrider.training.distillation import Training
from outrider.training.objectives import ObjectiveName
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe

PROMPT, ANSWER = 64, 128  # tokens
HEATS = (0.0, 1.0)
TEXT: Final = "text"
DISTILLED: Final = "agreement"
OBJECTIVES: tuple[Any, ...] = (TEXT, *get_args(ObjectiveName))
TREES = 12  # prompts that trees are measured on; others are learned from
PARTS = ("objectives", "heads", "online")


class Made(NamedTuple):
    """A drafter that was trained here."""

    folder: Path
    tokens: int
    seconds: float
    lengths: tuple[float, ...]  # acceptance length at each of HEATS

    @property
    def mean(self) -> float:
        """Of the acceptance lengths."""
        return sum(self.lengths) / len(self.lengths)


def main(
    tokens: Annotated[str, typer.Option(metavar="COUNT", help="That each drafter is trained on.")] = "600k",
    head_tokens: Annotated[str, typer.Option(metavar="COUNT", help="That heads are trained on.")] = "1M",
    parts: Annotated[list[str] | None, typer.Option("--part", help="objectives, heads, online. [default: all]")] = None,
    text: Annotated[str, typer.Option(help="To learn from: a folder, or stdlib, Python's library.")] = "stdlib",
    models: Annotated[Path, typer.Option(help="Folder that holds target/, drafter/ and mid/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
    keep: Annotated[Path | None, typer.Option(help="Folder that keeps what was trained; it goes on there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of learning while serving.")] = None,
) -> None:
    """Train drafters and heads, measure them, and print the tables. An hour and a half on two cores."""
    wanted = tuple(parts or PARTS)
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: must be of {', '.join(PARTS)}")
    screen, ends = Console(highlight=False), []
    surroundings.settle(torch.get_num_threads())
    with reported(), TemporaryDirectory() as scratch:
        bench = Bench(models, texts, keep or Path(scratch), text, screen)
        if "objectives" in wanted:
            ends.append(f"distilled_gain={bench.objectives(parse_count(tokens)):.3f}")
        if "heads" in wanted:
            bench.heads(parse_count(head_tokens))
        if "online" in wanted:
            ends.append(_online(models, keep or Path(scratch), plot))
    print(f"drafters: {' '.join(ends)}", flush=True)


class Bench:
    """What is trained lies in a folder, in which an interrupted run goes on."""

    def __init__(self, models: Path, texts: Path, folder: Path, text: str, screen: Console) -> None:
        self._models = models
        self._target = models / "target"
        self._folder = folder
        self._text = text
        self._screen = screen
        tokenizer = Tokenizer.from_file(str(self._target / "tokenizer.json"))
        self._prompts = [tokenizer.encode(prompt).ids for _, prompt in read_prompts(texts)]
        whole = [prompt[:PROMPT] for prompt in self._prompts if len(prompt) >= PROMPT]
        engine = load_engine(self._target, dtype="float32", slots=len(whole), rows=PROMPT + ANSWER)
        self._said = [say(engine, whole, temperature=heat, tokens=ANSWER, seed=1) for heat in HEATS]

    def objectives(self, tokens: int) -> float:
        """One drafter for each: the table, and by which share the distilled one is ahead of the one of text alone."""
        made = {
            name: self._train(name, DrafterRecipe(**self._common(name, tokens), layers=LAYERS, objective=name))
            for name in OBJECTIVES
        }
        own = f"{DISTILLED}, half on its own text"
        recipe = DrafterRecipe(**self._common(own, tokens), layers=LAYERS, objective=DISTILLED, on_policy=0.5)
        made[own] = self._train(own, recipe)
        self._screen.print(_table("two layers of the target, trained on the same text", made))
        return made[DISTILLED].mean / made[TEXT].mean - 1.0

    def heads(self, tokens: int) -> None:
        """One of each kind, and trees of theirs beside those of the models."""
        made = {
            kind: self._train(kind, HeadsRecipe(**self._common(kind, tokens), kind=kind, learning_rate=2e-3))
            for kind in get_args(Kind)
        }
        self._screen.print(_table("heads on the target, chains of four", made))
        own = self._folder / DISTILLED
        others = {kind: it.folder for kind, it in made.items()} | ({DISTILLED: own} if own.exists() else {})
        setting = Setting(
            drafters=("drafter", "mid", *others),
            others=tuple(others.items()),
            temperatures=HEATS,
            budgets=(4, 8, 16, 32),
            ours_alone=True,
        )
        results = run_trees(setting, self._models, self._prompts[:TREES], self._prompts[TREES:], 2, lambda said: None)
        print_tables(self._screen, setting, {cell: [figures[cell] for figures in results] for cell in results[0]})

    def _common(self, name: str, tokens: int) -> dict[str, Any]:
        return {"text": (self._text,), "target": self._target, "output": self._folder / name, "tokens": tokens}

    def _train(self, name: str, recipe: TrainingRecipe) -> Made:
        with self._screen.status(f"{name} ...") as status:
            training = Training(recipe, lambda what, _: status.update(f"{name}: {what} ..."))
            for now in training.run():
                status.update(f"{name}: {now.spent:.0%}, {now.left / 60:.0f} min left")
        return Made(recipe.output, now.tokens, now.seconds, tuple(map(training.acceptance, self._said)))


def _table(title: str, made: dict[str, Made]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    for heading in ("trained on", "tokens", "seconds", *(f"T = {heat:g}" for heat in HEATS), "mean"):
        table.add_column(heading, justify="left" if heading == "trained on" else "right", no_wrap=True)
    for name, it in made.items():
        lengths = (f"{length:.2f}" for length in (*it.lengths, it.mean))
        table.add_row(name, f"{it.tokens:,}", f"{it.seconds:,.0f}", *lengths)
    return table


def _online(models: Path, keep: Path, plot: Path | None) -> str:
    """The last line of `bench.online`, which is a cluster and a trainer beside it. Ends with what that ends with."""
    given = ("--models", models, "--keep", keep, *(("--plot", plot) if plot else ()))
    run = subprocess.run((sys.executable, "-m", "bench.online", *map(str, given)), stdout=subprocess.PIPE, text=True)
    print(run.stdout, end="")
    if run.returncode:
        raise typer.Exit(run.returncode)
    return run.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
