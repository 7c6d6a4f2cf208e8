"""`outrider router`, `outrider verifier`, `outrider drafter`: run one server in this process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from outrider.cli.command import Redis
from outrider.cli.flags import OBSERVED, RAY, TLS, configured, section
from outrider.fleet import process_env
from outrider.hub import hub_name
from outrider.rpc.lifecycle import die_with_parent, fast_event_loop, run_until_signal
from outrider.telemetry import logs

if TYPE_CHECKING:
    from outrider.config import DrafterConfig, RouterConfig, ServerConfig, VerifierConfig


Service: TypeAlias = Callable[..., Coroutine[Any, Any, None]]

ROUTER = configured("outrider.config:RouterConfig", "count", *RAY, variables=TLS | OBSERVED)
VERIFIER = configured("outrider.config:VerifierConfig", variables=TLS | OBSERVED)
DRAFTER = configured("outrider.config:DrafterConfig", "count", variables=TLS | OBSERVED)


def router(context: typer.Context, redis: Redis) -> None:
    """Serve clients: tokenize, place sessions, keep their state in Redis, control speculation."""
    config: RouterConfig = section(context)
    with _server_process("router", config, loads="tokenizers", checkpoints=config.models.values()) as announce:

        def service() -> Coroutine[Any, Any, None]:
            return _import_service("router.server")(config, redis, announce=announce)

        run_until_signal(_run_with_redis(redis, service), fast_event_loop)


def verifier(context: typer.Context, redis: Redis) -> None:
    """Hold the target model: verify token trees and commit the tokens that the target chooses."""
    config: VerifierConfig = section(context)
    _work("verifier", config, redis, (config.model, config.heads, config.features))


def drafter(context: typer.Context, redis: Redis = "") -> None:
    """Draft ahead of a target: grow token trees and stream them to a verifier, or to a tier of better drafters.

    Without --redis no router finds it, and it drafts for engines that name its address, such as vLLM.
    """
    config: DrafterConfig = section(context)
    _work("drafter", config, redis, (config.model, *config.candidates, config.target, config.heads))


def _work(
    role: Literal["verifier", "drafter"],
    config: VerifierConfig | DrafterConfig,
    redis: str,
    checkpoints: Iterable[Path | None],
) -> None:
    loads = str(config.model)
    with _server_process(role, config, loads=loads, checkpoints=filter(None, checkpoints)) as announce:

        def service() -> Coroutine[Any, Any, None]:
            if config.tensor_parallel > 1:
                from outrider.fleet import ranks

                return ranks.run(role, config, redis, announce=announce)
            return _import_service(f"{role}_svc.server")(config, redis, announce=announce)

        run_until_signal(_run_with_redis(redis, service))


def _import_service(module: str) -> Service:
    """Import a server's module and return its `run`."""
    gc.disable()  # collections during the imports take 0.05 s and find nothing
    try:
        run: Service = import_module(module).run
        return run
    finally:
        gc.enable()


@contextmanager
def _server_process(
    role: str, config: ServerConfig, *, loads: str, checkpoints: Iterable[Path]
) -> Iterator[Callable[[str], None]]:
    """Set this process up as a server. Yield a function that prints the address on stdout once the server listens."""
    die_with_parent()
    process_env.set_variables(getattr(config, "threads", 1))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logs.log_to_stderr(config.log_format)
    with ExitStack() as stack:
        if sys.stderr.isatty() and not any(map(hub_name, checkpoints)):  # a download shows its own progress
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(f"{role}: loading {loads} ..."))

        def announce(address: str) -> None:
            stack.close()
            gc.collect()
            gc.freeze()  # otherwise collections traverse all loaded objects, for 0.1 s, while sessions wait
            print(f"outrider {role}: listening on {address}", flush=True)

        yield announce


async def _run_with_redis(redis_url: str, service: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Check that Redis can be reached, then run the service. An empty URL: the service needs none.

    A server without Redis cannot be found by others, so it must fail instead of reporting that it is ready.
    """
    if not redis_url:
        return await service()
    from outrider.store.redis.client import connect, redis_errors

    client = connect(redis_url)
    try:
        with redis_errors(client):
            await client.ping()
    finally:
        await client.aclose()
    return await service()
