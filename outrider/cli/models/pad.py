"""`outrider pad`: makes a checkpoint as slow as a larger one, with the same output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.command import parse_count, reported
from outrider.hub import Mixture


def pad(
    source: Annotated[
        Path, typer.Argument(help="Checkpoint: a folder, a GGUF file, or ORG/NAME[@REVISION] on the hub.")
    ],
    destination: Annotated[
        Path, typer.Argument(help="Folder to write the padded checkpoint to, or a file ending in .gguf.")
    ],
    parameters: Annotated[
        int | None, typer.Option(parser=parse_count, metavar="COUNT", help="About how many parameters, like 150M.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="Pad to the shape of llama-3.1-8b or llama-3.2-1b instead.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Instead: this many token ids and nothing else, for a drafter of such a shape.")
    ] = None,
    to: Annotated[
        Mixture, typer.Option(help="Type of the weights of a GGUF file; _M: with more bits where they count most.")
    ] = "Q4_K_M",
) -> None:
    """Pad a checkpoint with weights that have no effect, to measure how fast a larger model would be."""
    from outrider.engine.checkpoints.gguf.recipes import pad_to_gguf
    from outrider.engine.checkpoints.padding import pad_checkpoint
    from outrider.hub import checkpoint_folder, is_gguf

    if sum(size is not None for size in (parameters, shape, vocabulary)) != 1:
        raise typer.BadParameter("give one of --parameters, --shape and --vocabulary")
    if is_gguf(destination) and parameters is None:
        raise typer.BadParameter("a GGUF file has the vocabulary of its source; give --parameters")
    with reported():
        checkpoint = checkpoint_folder(source)
        if is_gguf(destination):
            assert parameters is not None
            pad_to_gguf(checkpoint, destination, to, parameters)
        else:
            pad_checkpoint(checkpoint, destination, parameters=parameters, shape=shape, vocabulary=vocabulary)
    print(f"outrider pad: wrote {destination}")
