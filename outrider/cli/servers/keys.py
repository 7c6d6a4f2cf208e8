"""`outrider keys`: manages API keys, for routers with `auth = "keys"`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from outrider.cli.command import Redis, reported

if TYPE_CHECKING:
    from outrider.store.api_keys import ApiKey, Keys
    from outrider.store.redis.client import Client

ResultT = TypeVar("ResultT")

DAY_S = 24 * 3600.0

keys = typer.Typer(help="Manage API keys. Redis stores only their hashes.", no_args_is_help=True)


@keys.command()
def add(
    redis: Redis,
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to; tenants cannot see each other.")],
    name: Annotated[str, typer.Option(help="Purpose of the key, to distinguish it from others.")] = "",
    days: Annotated[float | None, typer.Option(help="Days until the key expires. [default: never]")] = None,
    role: Annotated[
        Literal["caller", "drafter"], typer.Option(help="What it opens: calls, or the gate for drafters that dial.")
    ] = "caller",
    model: Annotated[
        list[str] | None,
        typer.Option(help="A drafter's: a target that it may draft for; may be repeated. [default: all]"),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="A drafter's: sessions at once. [default: as many as it can]")
    ] = None,
) -> None:
    """Create a key and print it on stdout, only this once; the stored record follows on stderr."""
    valid_s = None if days is None else days * DAY_S
    bounds: dict[str, Any] = {"role": role, "models": model or (), "sessions": sessions}
    (secret, key), now = _with_keys(redis, lambda store: store.add(tenant, name, valid_s=valid_s, **bounds))
    print(secret)
    print(f"outrider: {_line(key, now)}; nobody can show it again", file=sys.stderr)


@keys.command("list")
def list_(redis: Redis) -> None:
    """List the keys."""
    listed, now = _with_keys(redis, lambda store: store.listed())
    for key in listed:
        print(_line(key, now))


@keys.command()
def readers(
    redis: Redis,
    tenant: Annotated[str, typer.Argument(help="Tenant whose texts these are.")],
    whose: Annotated[
        Literal["own", "cluster", "any"],
        typer.Argument(help="own: drafters with its keys; cluster: also the cluster's own; any: other tenants', too."),
    ],
) -> None:
    """Say whose drafters may read a tenant's texts; without this the cluster's own and the tenant's."""

    from outrider.store.api_keys import TextReaders

    _with_redis(redis, lambda client: TextReaders(client).set(tenant, whose))
    print(f"outrider: texts of {tenant} are for drafters of: {whose}")


@keys.command()
def revoke(
    redis: Redis, key_id: Annotated[str, typer.Argument(help="Id of the key, from `outrider keys list`.")]
) -> None:
    """Revoke a key. Routers refuse it within seconds; running calls continue."""
    print(f"outrider: revoked {_line(*_with_keys(redis, lambda store: store.revoke(key_id)))}")


def _with_keys(redis_url: str, work: Callable[[Keys], Awaitable[ResultT]]) -> tuple[ResultT, float]:
    """Run `work` on the key store and return its result, and Redis' time. Errors are reported as those of commands
    are."""

    async def run(client: Client) -> tuple[ResultT, float]:
        from outrider.store.api_keys import Keys

        store = Keys(client)
        return await work(store), store.clock.now()

    return _with_redis(redis_url, run)


def _with_redis(redis_url: str, work: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
    """Run `work` on Redis and return its result. Errors are reported as those of commands are."""

    async def run() -> ResultT:
        from outrider.store.redis.client import connect

        async with aclosing(connect(redis_url)) as client:
            return await work(client)

    with reported():
        return asyncio.run(run())


def _line(key: ApiKey, now: float) -> str:
    ends = "" if key.expires is None else f", {'expired' if key.expired(now) else 'expires'} {_day(key.expires)}"
    kind = "" if key.role == "caller" else f"  {key.role}"
    return f"{key.key_id}  {key.tenant}{key.name and f'  {key.name}'}{kind}  made {_day(key.created)}{ends}"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "minutes").removesuffix("+00:00")
