"""`outrider train online`: a drafter that gets better while its cluster serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.parent import die_with_parent
from outrider.cli.redis import Redis
from outrider.fleet import surroundings
from outrider.rpc.lifecycle import run_until_signal
from outrider.telemetry import logs


def online(
    redis: Redis,
    model: Annotated[Path, typer.Option(metavar="FOLDER", help="The drafter's checkpoint, as its drafters have it.")],
    target: Annotated[str, typer.Option(metavar="NAME", help="The model to learn from, as requests name it.")],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where versions are written; drafters must see it at the same path.")
    ],
    name: Annotated[str | None, typer.Option(help="The drafters' name. [default: the checkpoint's]")] = None,
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of a processor that it may take.")] = 0.2,
    objective: Annotated[str, typer.Option(help="forward-kl, reverse-kl, total-variation or agreement.")] = "agreement",
    rate: Annotated[float, typer.Option(min=1e-7, max=1.0, help="Of learning.")] = 3e-4,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a step.")] = 4,
    every: Annotated[int, typer.Option(min=1, help="Steps between two comparisons with the version in use.")] = 25,
) -> None:
    """Train a drafter on what its target says, while it serves: for routers with `teaches`, drafters with `learns`."""
    die_with_parent()
    os.nice(19)  # whoever serves goes first
    surroundings.settle(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logs.to_stderr("text")

    async def main() -> None:
        import asyncio
        from contextlib import aclosing

        from outrider.config import DrafterConfig
        from outrider.errors import ConfigError
        from outrider.hub import checkpoint_folder
        from outrider.store.client import connect, ping
        from outrider.training.objectives import NAMES
        from outrider.training.online import Course, Trainer

        if objective not in NAMES:
            raise ConfigError(f"objective: is {objective!r}, must be one of {', '.join(NAMES)}")
        drafter = DrafterConfig(model=model, name=name).model_name
        async with aclosing(connect(redis)) as client:
            await ping(client)
            folder = await asyncio.to_thread(checkpoint_folder, model)
            course = Course(folder, drafter, target, output, share, objective, rate, batch, every)  # type: ignore[arg-type]
            trainer = await asyncio.to_thread(Trainer, course, client)
            print(f"outrider train online: {drafter} learns from {target}", flush=True)
            await trainer.run()

    run_until_signal(main())
