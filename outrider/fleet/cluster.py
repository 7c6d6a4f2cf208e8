"""A cluster of servers, on this machine or on Ray: it starts them together, scales drafters, and stops all in order.

async with LocalCluster(config) as cluster:
    client = outrider.AsyncClient(cluster.router_address)
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Generic, Self, TypeVar

from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, Section, WorkerConfig
from outrider.errors import CheckpointError, ConfigError
from outrider.fleet.process import ClusterServer, Process, Role
from outrider.hub import CARD
from outrider.rpc.server import check_bindable
from outrider.rpc.tls import ROUTER
from outrider.store.api_keys import Keys
from outrider.store.compatibility import incompatible_drafters
from outrider.store.redis.acl import AclRole
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.store.registry import Registry

REGISTER_S = 30.0  # timeout for the workers' heartbeats to arrive
ANNOUNCED_S = 5.0  # timeout for listening workers to appear in the registry
TENANT = "outrider-up"  # of the temporary key with which the start is checked

ServerT = TypeVar("ServerT", bound=ClusterServer)


class Cluster(ABC, Generic[ServerT]):
    """All servers of a configuration. A cluster starts a Redis, too, unless the configuration or REDIS_URL names one.

    `forward(name, line)` receives every line that a server prints; `ready(server)` is called when a server is ready.

    Entering the context raises ConfigError and Unavailable; no process is left running then.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        forward: Callable[[str, str], None] = lambda name, line: None,
        ready: Callable[[ServerT], None] = lambda server: None,
    ) -> None:
        _check_names(config)
        _check_tokenizers(config)
        _check_cards(config)
        self.processes: dict[str, ServerT] = {}  # by name
        self.redis_url = ""
        self._redis: EmbeddedRedis | None = None  # the server that this cluster started
        self._config = config
        self._drafters = len(config.drafters)  # number of drafters ever created, for their names
        self._forward = forward
        self._ready = ready
        self._stack = AsyncExitStack()
        sections: list[tuple[Role, str, Section]] = [
            *(
                ("verifier", f"verifier-{number}", config.with_certificate("verifier", section))
                for number, section in enumerate(config.verifier)
            ),
            *(("drafter", f"drafter-{number}", section) for number, section in enumerate(config.drafters)),
            *(
                ("router", f"router-{number}" if number else "router", section)
                for number, section in enumerate(config.routers)
            ),
        ]
        if config.gateway is not None:
            sections.append(("gateway", "gateway", config.with_certificate("gateway", config.gateway)))
        for role, name, section in sections:
            self.processes[name] = self._server(role, name, section)

    async def misfits(self) -> list[str]:
        """Return a sentence for each drafter that can draft for no verifier.

        Wait up to ANNOUNCED_S for workers to appear in the registry.
        """
        names = {
            process.section.advertise or process.address: process.name
            for process in self.processes.values()
            if isinstance(process.section, WorkerConfig)
        }
        async with aclosing(connect(self.redis_url)) as redis:
            registry, give_up = Registry(redis), asyncio.get_running_loop().time() + ANNOUNCED_S
            workers = await registry.workers()
            while names.keys() - {it.address for it in workers} and asyncio.get_running_loop().time() < give_up:
                await asyncio.sleep(0.05)
                workers = await registry.workers()
        found = incompatible_drafters(workers, [worker for worker in workers if worker.role == "verifier"])
        lines = [f"{names.get(it.address, it.worker_id)} drafts for nobody: {why.explanation}" for it, why in found]
        return lines + self._without_features()

    def _without_features(self) -> list[str]:
        """Return a sentence for each drafter that needs hidden states, if no verifier sends them."""
        if any(worker.features for worker in self._config.verifier):
            return []
        sections = ((name, process.section) for name, process in self.processes.items())
        return [
            f"{name} drafts for nobody: its heads need the target's hidden states, and no verifier sends them; "
            f'set features = "{section.heads}" in the section of the verifier'
            for name, section in sections
            if isinstance(section, DrafterConfig) and section.heads is not None
        ]

    @abstractmethod
    def _server(self, role: Role, name: str, section: Section) -> ServerT:
        """Create a server that is not started yet."""

    @abstractmethod
    def _own_redis(self, stack: AsyncExitStack) -> EmbeddedRedis:
        """Start a Redis that runs as long as `stack`."""

    def redis_url_of(self, role: Role | AclRole) -> str:
        """Return the URL of the cluster's Redis for a role, with the role's own user if the cluster started that Redis;
        empty for a gateway, which needs none."""
        if role == "gateway":
            return ""
        return self.redis_url if self._redis is None else self._redis.url_of(role)

    @property
    def _further_routers(self) -> list[ServerT]:
        """The routers that share the address of the first one."""
        return [one for name, one in self.processes.items() if one.role == "router" and name != "router"]

    @property
    def router_address(self) -> str:
        """ "host:port" for clients."""
        return self.processes["router"].address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.redis_url = self._config.redis.url or os.environ.get("REDIS_URL") or ""
            if not self.redis_url:
                self._redis = self._own_redis(stack)
                self.redis_url = self._redis.url
            stack.push_async_callback(self._stop)
            later = {"gateway", *(router.name for router in self._further_routers)}
            await _all(self._start(process) for name, process in self.processes.items() if name not in later)
            if self._further_routers:  # all keep the port that the first one has got, also when they start again
                for router in (self.processes["router"], *self._further_routers):
                    router.section = router.section.model_copy(update={"listen": self.router_address})
            await _all(self._start(router) for router in self._further_routers)
            await self._await_workers()
            if gateway := self.processes.get("gateway"):
                gateway.section = self._gateway_section(gateway.section)
                await self._start(gateway)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def scale(self, drafters: Sequence[DrafterConfig]) -> None:
        """Change the drafters to `drafters` while sessions run: stop those that are not in it, start the missing ones.

        Raises ConfigError and Unavailable for a drafter that does not start; those started before it keep running.
        """
        missing = list(drafters)
        removed = []
        for process in self.processes.values():
            if process.role == "drafter":
                if process.section in missing:
                    missing.remove(process.section)
                else:
                    removed.append(process)
        for process in removed:
            del self.processes[process.name]
        await _all(process.stop() for process in removed)
        for section in missing:
            new = self._server("drafter", f"drafter-{self._drafters}", section)
            self._drafters += 1
            await self._start(new)
            self.processes[new.name] = new

    async def next_end(self) -> ServerT:
        """Wait until one of the processes that run now ends, and return it."""
        running = {process.name: process for process in self.processes.values() if process.status is None}
        waits = {asyncio.create_task(process.wait(), name=name) for name, process in running.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return running[done.pop().get_name()]
        finally:
            for task in waits:
                task.cancel()

    async def _start(self, process: ServerT) -> None:
        await process.start(self.redis_url_of(process.role))
        self._ready(process)

    async def _stop(self) -> None:
        for role in ("gateway", "router", "drafter", "verifier"):  # callers before the servers that they call
            await _all(process.stop() for process in self.processes.values() if process.role == role)

    def _gateway_section(self, gateway: Section) -> Section:
        """Return the gateway's section with the address and TLS settings of the started router."""
        router = self.processes["router"].section
        assert isinstance(router, RouterConfig)
        named = {"ca": router.ca, "tls": router.ca is not None, "server_name": ROUTER if router.ca else ""}
        return gateway.model_copy(update={"router": self.router_address, **named})

    async def _await_workers(self) -> None:
        """Wait until the router lists all workers. Raises ConfigError after REGISTER_S."""
        verifiers = len(self._config.verifier)
        drafters = len(self._config.drafters)
        async with self._client() as client:
            give_up = asyncio.get_running_loop().time() + REGISTER_S
            while asyncio.get_running_loop().time() < give_up:
                models = await client.models(timeout=REGISTER_S)
                seen = sum(model.verifiers for model in models)
                compatible = sum(model.drafters for model in models)
                if seen >= verifiers and compatible >= drafters:
                    return
                await asyncio.sleep(0.05)
        raise ConfigError(
            f"router: sees {seen} of {verifiers} verifiers and {compatible} of {drafters} drafters that fit them; "
            "the tokenizer.json in the folders of [router.models], of the verifiers and of the drafters must agree"
        )

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[AsyncClient]:
        """Yield a client of the cluster's router, with a temporary key if the router requires one."""
        router = self.processes["router"].section
        assert isinstance(router, RouterConfig)
        async with AsyncExitStack() as stack:
            secret = ""
            if router.auth == "keys":
                keys = Keys(await stack.enter_async_context(aclosing(connect(self.redis_url))))
                secret, key = await keys.add(TENANT, "outrider up", valid_s=2 * REGISTER_S)
                stack.push_async_callback(keys.revoke, key.key_id)
            yield await stack.enter_async_context(
                AsyncClient(
                    self.router_address, api_key=secret, ca=router.ca, tls=router.ca is not None, server_name=ROUTER
                )
            )


class LocalCluster(Cluster[Process]):
    """A cluster whose servers are child processes. They end with this process, even when it is killed (Linux)."""

    async def __aenter__(self) -> Self:
        for name, process in self.processes.items():  # before any of them starts
            _check_addresses("router" if process.role == "router" else name.replace("-", "."), process.section)
        return await super().__aenter__()

    def _server(self, role: Role, name: str, section: Section) -> Process:
        return Process(role, name, section, self._forward)

    def _own_redis(self, stack: AsyncExitStack) -> EmbeddedRedis:
        return stack.enter_context(EmbeddedRedis(self._config.redis.data))


def _check_addresses(path: str, section: Section) -> None:
    """Raise ConfigError for an address of a server that another program has taken; `path`: of its section."""
    for key in ("listen", "metrics", "health"):
        if (address := getattr(section, key, None)) is not None:
            check_bindable(f"{path}.{key}", address, share_port=getattr(section, "share_port", False))


def _check_names(config: ClusterConfig) -> None:
    for number, worker in enumerate(config.verifier):
        if worker.model_name not in config.router.models:
            known = ", ".join(config.router.models)
            raise ConfigError(
                f"verifier.{number}: serves {worker.model} as '{worker.model_name}', and [router.models] has {known}: "
                "add it there, or give the verifier the `name` of one"
            )


def _check_tokenizers(config: ClusterConfig) -> None:
    """Raise ConfigError for a drafter whose tokenizer no verifier has.

    A folder without a tokenizer is not checked here: its worker reports it.
    """
    targets = {_tokenizer(worker.model): worker.model_name for worker in config.verifier}
    for number, drafter in enumerate(config.drafters):
        if None not in (*targets, digest := _tokenizer(drafter.target or drafter.model)) and digest not in targets:
            from outrider.engine.checkpoints.checkpoint import tokenizer_difference

            which = tokenizer_difference(drafter.target or drafter.model, config.verifier[0].model)
            raise ConfigError(
                f"drafter.{number}.model: {drafter.model} has another tokenizer than {', '.join(targets.values())}"
                f"{which and f' ({which})'}; name that one's folder as `target` to draft by text, or draft with a "
                "model of its family"
            )


def _check_cards(config: ClusterConfig) -> None:
    """Raise ConfigError for a drafter whose card names a target that is not served, and CheckpointError if the
    checkpoints do not allow this check."""
    trained = {drafter.heads or drafter.model for drafter in config.drafters if not drafter.any_target}
    carded = {folder for folder in trained if (folder / CARD).exists()}
    if carded and all(worker.model.is_dir() for worker in config.verifier):
        from outrider.engine.checkpoints.model_card import check_card  # it imports torch

        for model in sorted(carded):
            check_card(model, [worker.model for worker in config.verifier])


def _tokenizer(checkpoint: Path) -> bytes | None:
    """Return the digest of a checkpoint's tokenizer; None if it has none."""
    from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest

    try:
        return read_tokenizer_digest(checkpoint)
    except CheckpointError:
        return None


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all coroutines concurrently. The first error cancels the others and is raised alone."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
