"""`make bench-drafters`: measures what training gains, as acceptance length on prompts that no training has seen.

It compares drafters of one shape that start from the same weights and see the same windows of text, one for each
objective; heads on the target, by the number of tree nodes; and a drafter that learns while the cluster serves.
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
from outrider.cli.command import parse_count, reported
from outrider.cli.performance.load import read_prompts
from outrider.engine.heads.config import Kind
from outrider.engine.loading import load_engine
from outrider.fleet import process_env
from outrider.training.acceptance import generate_texts
from outrider.training.distillation import Training
from outrider.training.objectives import ObjectiveName
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe
from outrider.training.tasks.drafter_task import DrafterTask
from outrider.training.tasks.heads_task import HeadsTask

PROMPT, ANSWER = 64, 128  # tokens
TEMPERATURES = (0.0, 1.0)
TEXT: Final = "text"
DISTILLED: Final = "agreement"
OBJECTIVES: tuple[Any, ...] = (TEXT, *get_args(ObjectiveName))
TREES = 12  # prompts on which trees are measured; drafters learn from the others
PARTS = ("objectives", "heads", "online")


class TrainedDrafter(NamedTuple):
    """A drafter that this benchmark has trained."""

    folder: Path
    tokens: int
    seconds: float
    lengths: tuple[float, ...]  # acceptance length at each of TEMPERATURES

    @property
    def mean(self) -> float:
        """The mean of the acceptance lengths."""
        return sum(self.lengths) / len(self.lengths)


def main(
    tokens: Annotated[str, typer.Option(metavar="COUNT", help="Training tokens of each drafter.")] = "600k",
    head_tokens: Annotated[str, typer.Option(metavar="COUNT", help="Training tokens of heads.")] = "1M",
    parts: Annotated[list[str] | None, typer.Option("--part", help="objectives, heads, online. [default: all]")] = None,
    text: Annotated[str, typer.Option(help="Training text: a folder, or stdlib, Python's library.")] = "stdlib",
    models: Annotated[Path, typer.Option(help="Folder that holds target/, drafter/ and mid/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
    keep: Annotated[Path | None, typer.Option(help="Folder for trained models; a later run continues there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG with the plot of learning while serving.")] = None,
) -> None:
    """Train drafters and heads, measure them, and print the tables. This takes an hour and a half on two cores."""
    wanted = tuple(parts or PARTS)
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: must be of {', '.join(PARTS)}")
    screen, ends = Console(highlight=False), []
    process_env.set_variables(torch.get_num_threads())
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
    """The trainings and their measurements. Trained models are in a folder, in which an interrupted run continues."""

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
        self._texts = [
            generate_texts(engine, whole, temperature=temperature, tokens=ANSWER, seed=1)
            for temperature in TEMPERATURES
        ]

    def objectives(self, tokens: int) -> float:
        """Train a drafter for each objective and print the table.

        Return the lead of the distilled drafter over the one that learned from text alone, as a share.
        """
        made = {
            name: self._train(name, DrafterRecipe(**self._common(name, tokens), layers=LAYERS, objective=name))
            for name in OBJECTIVES
        }
        on_policy = f"{DISTILLED}, half on its own text"
        recipe = DrafterRecipe(**self._common(on_policy, tokens), layers=LAYERS, objective=DISTILLED, on_policy=0.5)
        made[on_policy] = self._train(on_policy, recipe)
        self._screen.print(_table("two layers of the target, trained on the same text", made))
        return made[DISTILLED].mean / made[TEXT].mean - 1.0

    def heads(self, tokens: int) -> None:
        """Train heads of each kind, and print the acceptance of their trees beside that of the models' trees."""
        made = {
            kind: self._train(kind, HeadsRecipe(**self._common(kind, tokens), kind=kind, learning_rate=2e-3))
            for kind in get_args(Kind)
        }
        self._screen.print(_table("heads on the target, chains of four", made))
        distilled = self._folder / DISTILLED
        others = {kind: it.folder for kind, it in made.items()} | ({DISTILLED: distilled} if distilled.exists() else {})
        setting = Setting(
            drafters=("drafter", "mid", *others),
            others=tuple(others.items()),
            temperatures=TEMPERATURES,
            budgets=(4, 8, 16, 32),
            ours_alone=True,
        )
        results = run_trees(
            setting, self._models, self._prompts[:TREES], self._prompts[TREES:], 2, lambda message: None
        )
        print_tables(self._screen, setting, {cell: [figures[cell] for figures in results] for cell in results[0]})

    def _common(self, name: str, tokens: int) -> dict[str, Any]:
        return {"text": (self._text,), "target": self._target, "output": self._folder / name, "tokens": tokens}

    def _train(self, name: str, recipe: TrainingRecipe) -> TrainedDrafter:
        with self._screen.status(f"{name} ...") as status:
            training = Training(recipe, lambda what, _: status.update(f"{name}: {what} ..."))
            for now in training.run():
                status.update(f"{name}: {now.spent:.0%}, {now.left / 60:.0f} min left")
        task = training.task
        assert isinstance(task, DrafterTask | HeadsTask)
        with torch.no_grad():
            lengths = tuple(task.acceptance(training.student.eval(), texts) for texts in self._texts)
        return TrainedDrafter(recipe.output, now.tokens, now.seconds, lengths)


def _table(title: str, made: dict[str, TrainedDrafter]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    for heading in (
        "trained on",
        "tokens",
        "seconds",
        *(f"T = {temperature:g}" for temperature in TEMPERATURES),
        "mean",
    ):
        table.add_column(heading, justify="left" if heading == "trained on" else "right", no_wrap=True)
    for name, it in made.items():
        lengths = (f"{length:.2f}" for length in (*it.lengths, it.mean))
        table.add_row(name, f"{it.tokens:,}", f"{it.seconds:,.0f}", *lengths)
    return table


def _online(models: Path, keep: Path, plot: Path | None) -> str:
    """Run `bench.online` and return its last line. Exits with its status if it fails."""
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
