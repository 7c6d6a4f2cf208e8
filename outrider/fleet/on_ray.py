"""A cluster on Ray: each server a process as on one machine, with an actor beside it that holds its place on a node.

The actor starts, hears and stops the process, so a server is the same code in the same surroundings wherever it runs;
when the actor's node goes, so does the process. A worker of several ranks takes its places itself: see
`outrider.fleet.ranks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

from outrider.config import ClusterConfig, Section, WorkerConfig
from outrider.errors import OutriderError, Unavailable
from outrider.fleet.cluster import Cluster
from outrider.fleet.process import GRACE_S, Process, Role, start_limit
from outrider.fleet.ray_session import find_room, needs, node_address, on_ray, public
from outrider.store.embedded import EmbeddedRedis

MOST_LINES = 4096  # of a server's log that wait to be read
LOST = -1  # stands for the exit status of a server whose node is gone

Event = tuple[str, Any]  # "line", text; "ready", address and pid; "failed", error; "ended", status


class Seat:
    """Runs one server beside itself; an actor."""

    def __init__(self, role: Role, name: str, section: Section) -> None:
        import ray

        self._events: asyncio.Queue[Event] = asyncio.Queue()  # bounded by `_hear`; the other events are two
        if isinstance(section, WorkerConfig) and section.tensor_parallel > 1:
            section = section.model_copy(update={"ray": ray.get_runtime_context().gcs_address})
        elif listen := getattr(section, "listen", None):
            section = section.model_copy(update={"listen": public(listen)})
        self._process = Process(
            *(role, name, section, self._hear),
            forked=False,  # it would be the only one of its seat
        )

    def _hear(self, name: str, line: str) -> None:
        """Passes a line on, unless so many wait that nobody reads them."""
        if self._events.qsize() < MOST_LINES:
            self._events.put_nowait(("line", line))

    async def run(self, redis_url: str) -> AsyncIterator[Event]:
        """The server's life, from its start."""
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
        """Ends it in order."""
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
    """A Server on some node of the cluster."""

    def __init__(self, role: Role, name: str, section: Section, forward: Callable[[str, str], None]) -> None:
        self.role = role
        self.name = name
        self.section = section
        self.address = ""
        self.where = ""
        self.status: int | None = None
        self._forward = forward
        self._seat: Any = None
        self._life: asyncio.Task[None] | None = None
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
        if self._seat is not None:
            ray.kill(self._seat)  # of the time before: it would keep its place
        seat: Any = ray.remote(Seat)
        # Who watches over ranks does so from here: no node of theirs takes it away when it goes.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._seat = seat.options(
            num_cpus=wanted.get("CPU", 0.0),
            num_gpus=wanted.get("GPU", 0.0),
            resources=others,
            scheduling_strategy=here if ranked else "DEFAULT",
        ).remote(self.role, self.name, section)
        self.status = None
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # whether or not it is heard
        self._life = asyncio.create_task(self._follow(redis_url))
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
        assert self._life is not None
        await asyncio.shield(self._life)
        assert self.status is not None
        return self.status

    async def stop(self) -> None:
        import ray

        if self._seat is None:
            return
        if self.status is None and self._life is not None:
            drain = float(getattr(self.section, "drain_s", 0.0))
            with suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(drain + 2 * GRACE_S):
                    await _result(self._seat.stop.remote())
            await asyncio.wait([self._life], timeout=GRACE_S)
            self._life.cancel()
        ray.kill(self._seat)

    async def _follow(self, redis_url: str) -> None:
        """Hears what happens to it, to its end."""
        import ray

        try:
            async for event in self._seat.run.options(num_returns="streaming").remote(redis_url):
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
                self._ready.set_exception(Unavailable(f"{self.name}: its place on Ray is lost: {error}"))


class RayCluster(Cluster[RayServer]):
    """The servers are on the nodes of a Ray cluster, which this machine is one of.

    Servers that would listen on a loopback address listen on their node's. A Redis of its own runs here, and
    listens, with a password, on this node's address.
    """

    def __init__(self, config: ClusterConfig, address: str, **hearing: Any) -> None:
        """`address`: of the Ray cluster, or "auto"; `hearing` as for `Cluster`."""
        self._address = address
        self._session = AsyncExitStack()
        super().__init__(config, **hearing)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(on_ray(self._address))
            await super().__aenter__()
            self._session = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._session:
            await super().__aexit__(kind, error, trace)

    def _server(self, role: Role, name: str, section: Section) -> RayServer:
        return RayServer(role, name, section, self._forward)

    def _own_redis(self, stack: AsyncExitStack) -> str:
        return stack.enter_context(EmbeddedRedis(self._config.redis.data, host=node_address())).url


async def _result(work: Any) -> Any:
    return await asyncio.wrap_future(work.future())
