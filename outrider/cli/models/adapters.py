"""`outrider adapters`: loads, lists and unloads low-rank adapters (LoRA) of a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outrider.cli.command import Address, Profile, reported

if TYPE_CHECKING:
    from outrider.client import AsyncClient, ModelAdapter

ResultT = TypeVar("ResultT")

adapters = typer.Typer(help="Load, list and unload LoRA adapters of a running cluster.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name by which requests ask for the adapter, as their model.")]


@adapters.command()
def load(
    name: Name,
    folder: Annotated[str, typer.Argument(help="The adapter's folder, below that of the verifiers' `adapters`.")],
    address: Address = None,
    profile: Profile = None,
    model: Annotated[str, typer.Option(help="The model's name, where the cluster serves several.")] = "",
) -> None:
    """Have all verifiers of a model load an adapter. One that has the name already is replaced."""
    print(_line(_with_client(address, profile, lambda client: client.load_adapter(name, folder, model=model))))


@adapters.command("list")
def list_(address: Address = None, profile: Profile = None) -> None:
    """List the adapters that requests may ask for."""
    for model in _with_client(address, profile, lambda client: client.models()):
        for adapter in model.adapters:
            print(_line(adapter))


@adapters.command()
def unload(name: Name, address: Address = None, profile: Profile = None) -> None:
    """Take an adapter's name away. Sessions that have it go on."""
    _with_client(address, profile, lambda client: client.unload_adapter(name))
    print(f"unloaded {name}")


def _with_client(
    address: str | None, profile: str | None, work: Callable[[AsyncClient], Awaitable[ResultT]]
) -> ResultT:
    """Run `work` with a client and return its result. Errors are reported as those of commands are."""

    async def run() -> ResultT:
        from outrider.client import AsyncClient

        async with AsyncClient(address, profile=profile) as client:
            return await work(client)

    with reported():
        return asyncio.run(run())


def _line(adapter: ModelAdapter) -> str:
    return (
        f"{adapter.name}  of {adapter.model}  folder {adapter.folder}  rank {adapter.rank}  "
        f"{adapter.parameters / 1e6:.2f}M parameters  {adapter.digest.hex()[:12]}"
    )
