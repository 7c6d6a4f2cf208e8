"""`outrider train online`: trains a drafter while its cluster serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.command import Redis
from outrider.fleet import process_env
from outrider.rpc.lifecycle import die_with_parent, run_until_signal
from outrider.telemetry import logs


def online(
    redis: Redis,
    model: Annotated[Path, typer.Option(metavar="FOLDER", help="The checkpoint that the drafters run.")],
    target: Annotated[str, typer.Option(metavar="NAME", help="Name of the served model to learn from.")],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the versions; drafters must see it at the same path.")
    ],
    name: Annotated[str | None, typer.Option(help="The drafters' model name. [default: the checkpoint's]")] = None,
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of one processor to use.")] = 0.2,
    objective: Annotated[str, typer.Option(help="forward-kl, reverse-kl, total-variation or agreement.")] = "agreement",
    rate: Annotated[float, typer.Option(min=1e-7, max=1.0, help="Learning rate.")] = 3e-4,
    batch: Annotated[int, typer.Option(min=1, help="Training samples in a step.")] = 4,
    every: Annotated[int, typer.Option(min=1, help="Steps between two comparisons with the version in use.")] = 25,
) -> None:
    """Train a drafter on its target's text while the cluster serves.

    Routers need the setting `teaches`, drafters the setting `learns`.
    """
    die_with_parent()
    os.nice(19)  # servers on this machine have priority
    process_env.set_variables(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logs.log_to_stderr("text")

    async def main() -> None:
        import asyncio
        from contextlib import aclosing

        from outrider.config import DrafterConfig
        from outrider.errors import ConfigError
        from outrider.hub import checkpoint_folder
        from outrider.store.redis.client import connect, ping
        from outrider.training.objectives import NAMES
        from outrider.training.online.trainer import OnlineTrainingConfig, Trainer

        if objective not in NAMES:
            raise ConfigError(f"objective: is {objective!r}, must be one of {', '.join(NAMES)}")
        drafter = DrafterConfig(model=model, name=name).model_name
        async with aclosing(connect(redis)) as client:
            await ping(client)
            folder = await asyncio.to_thread(checkpoint_folder, model)
            config = OnlineTrainingConfig(folder, drafter, target, output, share, objective, rate, batch, every)  # type: ignore[arg-type]
            trainer = await asyncio.to_thread(Trainer, config, client)
            print(f"outrider train online: {drafter} learns from {target}", flush=True)
            await trainer.run()

    run_until_signal(main())
