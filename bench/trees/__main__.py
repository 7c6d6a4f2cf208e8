"""`make bench-trees`: takes at most ten minutes on two cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tokenizers import Tokenizer

from bench.trees.cells import DRAFTERS, MODELS, Setting
from bench.trees.figures import last_line
from bench.trees.running import run
from bench.trees.tables import print_tables, save
from outrider.cli.command import reported
from outrider.cli.performance.load import read_prompts
from outrider.engine.checkpoints.checkpoint import read_json
from outrider.errors import ConfigError
from outrider.fleet import process_env

WIDTH = 132  # of tables that are printed to a file
LONGEST = 400  # longest prompt, in tokens: prompt and answer must fit into the models' context


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure on.")] = 12,
    taught: Annotated[int, typer.Option("--taught", min=1, help="Other prompts, for drafters to learn from.")] = 8,
    drafters: Annotated[list[str] | None, typer.Option("--drafter", help="[default: all]")] = None,
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperature", min=0, help="[default: 0, 0.6 and 1]")
    ] = None,
    budgets: Annotated[list[int] | None, typer.Option("--nodes", min=1, help="[default: 4, 8, 16, 32, 64]")] = None,
    also: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="Another drafter: a model, or heads on the target.")
    ] = None,
    ours_alone: Annotated[bool, typer.Option("--ours-alone", help="Leave out other rules and constructions.")] = False,
    noises: Annotated[int, typer.Option(min=1, help="Draws of the shared noise at each root.")] = Setting().noises,
    drafts: Annotated[int, typer.Option(min=1, help="Draws of trees at each root.")] = Setting().drafts,
    roots: Annotated[int, typer.Option(min=1, help="Roots in each text.")] = 4,
    processes: Annotated[int, typer.Option(min=1, help="Processes, each with one thread.")] = 2,
    models: Annotated[Path, typer.Option(help="Folder that holds target/, drafter/ and mid/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
    name: Annotated[str | None, typer.Option("--save", metavar="NAME", help="[default: trees and the time]")] = None,
) -> None:
    """Measure acceptance lengths of tree constructions x acceptance rules x drafters x budgets x temperatures."""
    began = time.monotonic()
    default = Setting()
    others = dict(given.partition("=")[::2] for given in also or [])
    setting = Setting(
        drafters=(*(drafters or default.drafters), *others),
        others=tuple((name, Path(folder)) for name, folder in others.items()),
        ours_alone=ours_alone,
        temperatures=tuple(temperatures or default.temperatures),
        budgets=tuple(sorted(set(budgets or default.budgets))),
        noises=noises,
        drafts=drafts,
        roots=roots,
    )
    with reported():
        if unknown := set(setting.drafters) - {*DRAFTERS, *others}:
            raise ConfigError(f"--drafter: {', '.join(sorted(unknown))}: must be one of {', '.join(DRAFTERS)}")
        for needed in (models / model / "config.json" for model in ("target", *MODELS)):
            if not needed.is_file():
                raise ConfigError(f"--models: {needed} does not exist; run in a checkout of Outrider")
        for _, folder in setting.others:
            read_json(folder / "config.json")
        held_out = read_prompts(texts)
        if prompts + taught > len(held_out):
            raise ConfigError(f"--prompts: and --taught are {prompts + taught}, {texts} has {len(held_out)}")
    process_env.set_variables(1)
    tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids[:LONGEST] for _, prompt in held_out[: prompts + taught]]
    progress = Console(stderr=True, highlight=False)
    results = run(setting, models, ids[:prompts], ids[prompts:], processes, progress.print)
    cells = {cell: [figures[cell] for figures in results] for cell in results[0]}
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    print_tables(screen, setting, cells)
    seconds = time.monotonic() - began
    path = save(setting, cells, [name for name, _ in held_out[:prompts]], name, seconds)
    screen.print(f"{seconds:.0f} s. {path}", markup=False, soft_wrap=True)
    print(last_line(cells), flush=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
