"""`outrider quantize`: writes a checkpoint as a GGUF file in a quantized type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.command import reported
from outrider.hub import Mixture


def quantize(
    source: Annotated[
        Path, typer.Argument(help="Checkpoint: a folder, a GGUF file, or ORG/NAME[@REVISION] on the hub.")
    ],
    destination: Annotated[Path, typer.Argument(help="File to write, whose name ends in .gguf.")],
    to: Annotated[
        Mixture,
        typer.Option(help="Type of the weights; _M: with more bits where they count most."),
    ] = "Q4_K_M",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Checkpoint whose tokenizer and chat template the file gets. [default: source]")
    ] = None,
) -> None:
    """Write a checkpoint as a GGUF file, which llama.cpp loads, too."""
    from rich.console import Console
    from rich.progress import Progress

    from outrider.engine.checkpoints.checkpoint import read_config
    from outrider.engine.checkpoints.gguf.recipes import recipe
    from outrider.engine.checkpoints.gguf.writer import write_gguf
    from outrider.errors import ConfigError
    from outrider.hub import checkpoint_folder, is_gguf

    with reported():
        if not is_gguf(destination):
            raise ConfigError(f"destination: {destination} must end in .gguf")
        folder = checkpoint_folder(source)
        config = read_config(folder)
        screen = Console(stderr=True)
        with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
            task = bar.add_task("quantizing", total=1.0)
            write_gguf(
                folder,
                destination,
                recipe(to, config),
                tokenizer=tokenizer,
                progress=lambda done: bar.update(task, completed=done),
            )
    print(f"outrider quantize: wrote {destination}, {destination.stat().st_size / 1e6:.1f} MB")
