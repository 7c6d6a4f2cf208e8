"""`outrider keys`: API keys, for routers with `auth = "keys"`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outrider.cli.redis import Redis
from outrider.cli.reporting import reported

if TYPE_CHECKING:
    from outrider.store.keys import ApiKey, Keys

ResultT = TypeVar("ResultT")

DAY_S = 24 * 3600.0

keys = typer.Typer(help="API keys, of which Redis holds hashes only.", no_args_is_help=True)


@keys.command()
def add(
    redis: Redis,
    tenant: Annotated[str, typer.Argument(help="Whose key it is; tenants see nothing of each other.")],
    name: Annotated[str, typer.Option(help="What it is for, to tell it from the tenant's others.")] = "",
    days: Annotated[float | None, typer.Option(help="For how long it is good. [default: for ever]")] = None,
) -> None:
    """Make a key and print it on stdout, this once; what is kept of it follows on stderr."""
    secret, key = _with_keys(redis, lambda kept: kept.add(tenant, name, valid_s=None if days is None else days * DAY_S))
    print(secret)
    print(f"outrider: {_line(key)}; nobody can show it again", file=sys.stderr)


@keys.command("list")
def list_(redis: Redis) -> None:
    """Say which keys there are."""
    for key in _with_keys(redis, lambda kept: kept.listed()):
        print(_line(key))


@keys.command()
def revoke(redis: Redis, key_id: Annotated[str, typer.Argument(help="As `outrider keys list` has it.")]) -> None:
    """Have a key refused from now on; routers do within seconds. Calls that run go on."""
    print(f"outrider: revoked {_line(_with_keys(redis, lambda kept: kept.revoke(key_id)))}")


def _with_keys(redis_url: str, work: Callable[[Keys], Awaitable[ResultT]]) -> ResultT:
    """Its result; errors are reported."""

    async def run() -> ResultT:
        from outrider.store.client import connect
        from outrider.store.keys import Keys

        async with aclosing(connect(redis_url)) as client:
            return await work(Keys(client))

    with reported():
        return asyncio.run(run())


def _line(key: ApiKey) -> str:
    ends = "" if key.expires is None else f", {'expired' if key.expired else 'expires'} {_day(key.expires)}"
    return f"{key.key_id}  {key.tenant}{key.name and f'  {key.name}'}  made {_day(key.created)}{ends}"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "minutes").removesuffix("+00:00")
