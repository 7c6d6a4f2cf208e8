"""A cluster on Ray: each server is a process, as on one machine, with an actor that reserves its resources on a node.

The actor starts the process, reads its output and stops it, so a server runs the same code in the same environment on
every machine. When the actor's node is lost, so is the process. A worker with several ranks reserves its resources
itself: see `outrider.fleet.ranks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from outrider.config import ClusterConfig, Section, WorkerConfig
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.fleet.cluster import Cluster
from outrider.fleet.process import GRACE_S, Process, Role, start_limit
from outrider.fleet.ray_session import find_room, needs, node_address, on_ray, public
from outrider.store.redis.embedded import EmbeddedRedis

MAX_LINES = 4096  # of a server's log that wait to be read
LOST = -1  # exit status of a server whose node is lost

Event = tuple[str, Any]  # "line", text; "ready", address and pid; "failed", error; "ended", status


class RayProcessActor:
    """An actor on Ray that runs one server as a child process."""

    def __init__(self, role: Role, name: str, section: Section) -> None:
        import ray

        # `_add_line` bounds the lines; there are at most two other events.
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        if isinstance(section, WorkerConfig) and section.tensor_parallel > 1:
            section = section.model_copy(update={"ray": ray.get_runtime_context().gcs_address})
        elif listen := getattr(section, "listen", None):
            section = section.model_copy(update={"listen": public(listen)})
        self._process = Process(role, name, section, self._add_line)

    def _add_line(self, name: str, line: str) -> None:
        """Queue a line of output; drop it if MAX_LINES wait, because then nothing reads them."""
        if self._events.qsize() < MAX_LINES:
            self._events.put_nowait(("line", line))

    async def run(self, redis_url: str) -> AsyncIterator[Event]:
        """Start the server and yield its events until it ends."""
        watching = asyncio.create_task(self._watch(redis_url))
        try:
            while True:
                kind, value = await self._events.get()
                yield kind, value
                if kind in ("failed", "ended"):
                    return
        finally:
            watching.cancel()

    async def stop(self) -> None:
        """Stop the server in order."""
        await self._process.stop()

    async def _watch(self, redis_url: str) -> None:
        try:
            await self._process.start(redis_url)
        except OutriderError as error:
            self._events.put_nowait(("failed", error))
            return
        self._events.put_nowait(("ready", (self._process.address, self._process.pid)))
        self._events.put_nowait(("ended", await self._process.wait()))


class RayServer:
    """A ClusterServer on some node of a Ray cluster."""

    def __init__(self, role: Role, name: str, section: Section, forward: Callable[[str, str], None]) -> None:
        self.role = role
        self.name = name
        self.section = section
        self.address = ""
        self.where = ""
        self.status: int | None = None
        self._forward = forward
        self._actor: Any = None
        self._following: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None]

    async def start(self, redis_url: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        section: Any = self.section
        limit = start_limit(section)
        ranked = isinstance(section, WorkerConfig) and section.tensor_parallel > 1
        wanted = {} if ranked else needs(section, getattr(section, "threads", 1))
        await find_room(wanted, 1, self.name)
        others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
        if self._actor is not None:
            ray.kill(self._actor)  # the actor of the previous start would keep its resources
        actor: Any = ray.remote(RayProcessActor)
        # The process that supervises ranks runs on this node, so that it survives the loss of a rank's node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = actor.options(
            num_cpus=wanted.get("CPU", 0.0),
            num_gpus=wanted.get("GPU", 0.0),
            resources=others,
            scheduling_strategy=here if ranked else "DEFAULT",
        ).remote(self.role, self.name, section)
        self.status = None
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark the error as retrieved
        self._following = asyncio.create_task(self._follow(redis_url))
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.stop()
            raise Unavailable(f"{self.name}: did not start within {limit:g} s; is there room for it on Ray?") from None
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        assert self._following is not None
        await asyncio.shield(self._following)
        assert self.status is not None
        return self.status

    async def stop(self) -> None:
        import ray

        if self._actor is None:
            return
        if self.status is None and self._following is not None:
            drain = float(getattr(self.section, "drain_s", 0.0))
            with suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(drain + 2 * GRACE_S):
                    await _result(self._actor.stop.remote())
            await asyncio.wait([self._following], timeout=GRACE_S)
            self._following.cancel()
        ray.kill(self._actor)

    async def _follow(self, redis_url: str) -> None:
        """Handle the actor's events until the server ends."""
        import ray

        try:
            async for event in self._actor.run.options(num_returns="streaming").remote(redis_url):
                match await event:
                    case "line", line:
                        self._forward(self.name, line)
                    case "ready", (address, pid):
                        self.address, self.where = address, f"pid {pid} on {address.rpartition(':')[0]}"
                        self._ready.set_result(None)
                    case "failed", error:
                        self.status = LOST
                        self._ready.set_exception(error)
                    case "ended", status:
                        self.status = status
        except ray.exceptions.RayError as error:
            self.status = LOST
            self._forward(self.name, f"is lost: {str(error).splitlines()[0]}")
            if not self._ready.done():
                self._ready.set_exception(Unavailable(f"{self.name}: its actor on Ray is lost: {error}"))


class RayCluster(Cluster[RayServer]):
    """A cluster whose servers run on the nodes of a Ray cluster. This machine must be one of the nodes.

    Servers with a loopback address in the configuration listen on their node's address. If the cluster starts a Redis,
    it runs on this machine and listens on this node's address, with a password.
    """

    def __init__(self, config: ClusterConfig, address: str, **callbacks: Any) -> None:
        """`address`: of the Ray cluster, or "auto"; `callbacks` as for `Cluster`."""
        if config.router.count > 1:
            raise ConfigError(
                "router.count: routers on several nodes have no address in common; start more with `outrider router`, "
                "and give clients the addresses of all"
            )
        self._address = address
        self._session = AsyncExitStack()
        super().__init__(config, **callbacks)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(on_ray(self._address))
            await super().__aenter__()
            self._session = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._session:
            await super().__aexit__()

    def _server(self, role: Role, name: str, section: Section) -> RayServer:
        return RayServer(role, name, section, self._forward)

    def _own_redis(self, stack: AsyncExitStack) -> EmbeddedRedis:
        return stack.enter_context(EmbeddedRedis(self._config.redis.data, host=node_address()))


async def _result(call: Any) -> Any:
    return await asyncio.wrap_future(call.future())
