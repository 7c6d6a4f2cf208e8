"""A worker of several ranks: each an actor on Ray, all in one placement group, started again together when one is lost.

Rank 0 is the worker that others see: it has the scheduler and serves gRPC. The others do what it plans. This process
only watches, and tells the health of all to probes. Rank 0 is on its node, if any rank is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.config import WorkerConfig
from outrider.errors import OutriderError, Unavailable
from outrider.fleet import surroundings
from outrider.fleet.pauses import Pauses
from outrider.fleet.process import GRACE_S, Role
from outrider.fleet.ray_session import find_room, needs, node_address, on_ray, public
from outrider.rpc.lifecycle import user_error
from outrider.rpc.server import NOT_SERVING, SERVING, Health, probed

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from outrider.engine.group import Group

PLACE_S = 60.0  # for the cluster to make room that it has

log = logging.getLogger(__name__)


async def run(role: Role, config: WorkerConfig, redis_url: str, *, announce: Callable[[str], None]) -> None:
    """Serves until cancelled. `announce` hears the address each time that the group is ready.

    Raises what the first start fails with: ConfigError where ranks cannot share the model or do not fit the cluster,
    CheckpointError, Unavailable. Nothing is left running then.
    """
    vitals, name = Health(), f"outrider.v1.{role.capitalize()}"  # the group's; "" is this process alone
    async with probed(config.health, vitals):
        wanted = needs(config, config.threads)
        with on_ray(config.ray, cpus=wanted.get("CPU", 0.0) * config.tensor_parallel):
            pauses = Pauses()
            while True:
                group = RankGroup(role, config.model_copy(update={"health": None}), redis_url)
                began = asyncio.get_running_loop().time()
                try:
                    announce(await group.start())
                    await vitals.set(name, SERVING)
                    await group.ended()
                    return
                except asyncio.CancelledError:
                    await vitals.enter_graceful_shutdown()
                    await group.drain()
                    raise
                except OutriderError as error:
                    await vitals.set(name, NOT_SERVING)
                    if not group.was_ready and not pauses.taken:
                        raise
                    log.error("%s; all ranks are started again", error)
                finally:
                    await group.kill()
                pauses.ran(asyncio.get_running_loop().time() - began)
                await pauses.take()


class RankGroup:
    """The ranks of one worker from their start to their end."""

    def __init__(self, role: Role, config: WorkerConfig, redis_url: str) -> None:
        self.was_ready = False
        self._role = role
        self._config = config
        self._redis_url = redis_url
        self._place: PlacementGroup | None = None
        self._ranks: list[Any] = []  # actors
        self._running: list[asyncio.Future[None]] = []

    async def start(self) -> str:
        """Starts all; the address that rank 0 serves at."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config, wanted = self._config, needs(self._config, self._config.threads)
        self._place = await self._placed(wanted)
        actor: Any = ray.remote(Rank)
        for rank, bundle in enumerate(self._nearest_first()):
            at = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=bundle)
            self._ranks.append(
                actor.options(
                    num_cpus=wanted.get("CPU", 0.0),
                    num_gpus=wanted.get("GPU", 0.0),
                    scheduling_strategy=at,
                    max_concurrency=8,
                ).remote(self._role, config, rank)
            )
        first, *others = self._ranks
        meeting = await self._heard(0, first.meeting.remote())
        await asyncio.gather(*(self._heard(rank, it.join.remote(meeting)) for rank, it in enumerate(self._ranks)))
        lives = [first.serve.remote(self._redis_url), *(it.follow.remote() for it in others)]
        self._running = [asyncio.ensure_future(self._heard(rank, life)) for rank, life in enumerate(lives)]
        address: str = await self._before_an_end(first.listening.remote())
        self.was_ready = True
        return address

    async def ended(self) -> None:
        """Waits until rank 0 has served to its end. Raises what a rank fails with, Unavailable when one is lost."""
        await asyncio.wait(self._running, return_when=asyncio.FIRST_EXCEPTION)
        for ended in self._running:
            if ended.done():
                ended.result()

    async def drain(self) -> None:
        """Has rank 0 end in order, and the others with it, as long as that takes no longer than it should."""
        if not self.was_ready:
            return
        self._ranks[0].stop.remote()
        await asyncio.wait(self._running, timeout=self._config.drain_s + GRACE_S)

    async def kill(self) -> None:
        """Ends what still runs, and gives its place back."""
        import ray

        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for rank in self._ranks:
            ray.kill(rank)
        if self._place is not None:
            ray.util.remove_placement_group(self._place)

    async def _placed(self, wanted: dict[str, float]) -> PlacementGroup:
        import ray

        config, bundle = self._config, wanted or {"CPU": 0.001}  # Ray takes no empty ones
        await find_room(bundle, config.tensor_parallel, "tensor_parallel: ranks", config.join_s)
        place: PlacementGroup = ray.util.placement_group(
            [bundle] * config.tensor_parallel, strategy="SPREAD" if config.spread else "PACK"
        )
        try:
            async with asyncio.timeout(PLACE_S):
                await asyncio.wrap_future(place.ready().future())
        except TimeoutError:
            ray.util.remove_placement_group(place)
            raise Unavailable(
                f"tensor_parallel: the Ray cluster has no room for {config.tensor_parallel} ranks now: others use it"
            ) from None
        return place

    def _nearest_first(self) -> list[int]:
        """The bundles, those on this node before others: where this process is, rank 0 is looked for."""
        import ray

        nodes: dict[int, str] = ray.util.placement_group_table(self._place)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        return sorted(nodes, key=lambda bundle: (nodes[bundle] != here, bundle))

    async def _before_an_end(self, work: Any) -> Any:
        """The result, unless a rank ends first."""
        waits = asyncio.ensure_future(self._heard(0, work))
        try:
            await asyncio.wait([waits, *self._running], return_when=asyncio.FIRST_COMPLETED)
            for ended in self._running:
                if ended.done():
                    ended.result()
            return await waits
        finally:
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)

    async def _heard(self, rank: int, work: Any) -> Any:
        """A call's result. Raises the OutriderError that it fails with, Unavailable when the rank is lost."""
        import ray

        try:
            return await asyncio.wrap_future(work.future())
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, OutriderError) else error from None
        except ray.exceptions.RayActorError as error:
            raise Unavailable(f"{self._role}: rank {rank} is lost: {str(error).splitlines()[0]}") from None


class Rank:
    """One rank, an actor."""

    def __init__(self, role: Role, config: WorkerConfig, rank: int) -> None:
        surroundings.settle(config.threads)  # before torch is loaded
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._service = import_module(f"{role}_svc.service")
        self._config = config
        self._rank = rank
        self._listening: asyncio.Future[str]
        self._serving: asyncio.Task[None] | None = None
        self._group: Group

    async def meeting(self) -> str:
        """Where the ranks meet: a port of this one's node, and what only they know."""
        self._listening = asyncio.get_running_loop().create_future()
        host = self._host()
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}#{secrets.token_hex(16)}"

    async def join(self, meeting: str) -> None:
        """Meets the others."""
        from outrider.engine.loading import meet
        from outrider.hub import checkpoint_folder

        config = self._config

        def met() -> Group:
            folder, of = checkpoint_folder(config.model), config.tensor_parallel
            return meet(folder, config.backend, config.device, self._rank, of, meeting, host=self._host())

        self._group = await asyncio.to_thread(met)

    async def follow(self) -> None:
        """Does what rank 0 plans, to its end."""
        from outrider.engine.ranks import follow

        def whole_life() -> None:
            follow(self._service.load_part(self._config, self._group), self._group)

        await _told(asyncio.to_thread(whole_life))

    async def serve(self, redis_url: str) -> None:
        """Is the worker, until stopped."""
        config = self._config
        if config.ray is not None:
            config = config.model_copy(update={"listen": public(config.listen)})
        self._serving = asyncio.ensure_future(
            self._service.run(config, redis_url, announce=self._listening.set_result, group=self._group)
        )
        with suppress(asyncio.CancelledError):
            await _told(self._serving)

    async def listening(self) -> str:
        """The address that it serves at, once it does."""
        return await self._listening

    def _host(self) -> str:
        """Where the other ranks reach this one: on this machine, or on its node's address."""
        return "127.0.0.1" if self._config.ray is None else node_address()

    async def stop(self) -> None:
        """Has it drain and end."""
        if self._serving is not None:
            self._serving.cancel()


async def _told(work: Any) -> None:
    """Awaits it; of a group of errors that the user can mend, raises the one that says it."""
    try:
        await work
    except Exception as error:
        raise user_error(error) or error from None
