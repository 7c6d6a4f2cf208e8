"""A worker with several ranks: each is an actor on Ray, all in one placement group, and a lost rank restarts them all.

Rank 0 is the worker that other servers connect to: it runs the scheduler and serves gRPC. The other ranks execute its
plans. This process only supervises them and reports their health to probes. Rank 0 is placed on this process's node if
any rank is.
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
from outrider.fleet import process_env
from outrider.fleet.process import GRACE_S, Role, restart_backoff
from outrider.fleet.ray_session import find_room, needs, node_address, on_ray, public
from outrider.rpc.core_dumps import forbid_core_dumps
from outrider.rpc.lifecycle import user_error
from outrider.rpc.server import NOT_SERVING, SERVING, Health, plaintext_health

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from outrider.engine.tensor_parallel.group import Group

PLACE_S = 60.0  # timeout for Ray to place the ranks
# The modules of each role that have `run` and `load_part`.
SERVICES = {
    "verifier": ("verifier_svc.server", "verifier_svc.server"),
    "drafter": ("drafter_svc.server", "drafter_svc.loading"),
}

log = logging.getLogger(__name__)


async def run(role: Role, config: WorkerConfig, redis_url: str, *, announce: Callable[[str], None]) -> None:
    """Serve until cancelled. `announce` receives the address each time that the group is ready.

    Raises the error of a failed first start: ConfigError if the ranks cannot share the model or do not fit on the
    cluster, CheckpointError, Unavailable. No rank is left running then.
    """
    health, name = Health(), f"outrider.v1.{role.capitalize()}"  # name of the group's health; "" is this process's
    async with plaintext_health(config.health, health):
        wanted = needs(config, config.threads)
        with on_ray(config.ray, cpus=wanted.get("CPU", 0.0) * config.tensor_parallel):
            backoff = restart_backoff()
            while True:
                group = RankGroup(role, config.model_copy(update={"health": None}), redis_url)
                began = asyncio.get_running_loop().time()
                try:
                    announce(await group.start())
                    await health.set(name, SERVING)
                    await group.ended()
                    return
                except asyncio.CancelledError:
                    await health.enter_graceful_shutdown()
                    await group.drain()
                    raise
                except OutriderError as error:
                    await health.set(name, NOT_SERVING)
                    if not group.was_ready and not backoff.attempts:
                        raise
                    log.error("%s; all ranks are started again", error)
                finally:
                    await group.kill()
                backoff.ended_after(asyncio.get_running_loop().time() - began)
                await backoff.wait()


class RankGroup:
    """The ranks of one worker, from their start to their end."""

    def __init__(self, role: Role, config: WorkerConfig, redis_url: str) -> None:
        self.was_ready = False
        self._role = role
        self._config = config
        self._redis_url = redis_url
        self._placement: PlacementGroup | None = None
        self._ranks: list[Any] = []  # actors
        self._running: list[asyncio.Future[None]] = []

    async def start(self) -> str:
        """Start all ranks and return the address at which rank 0 serves."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config, wanted = self._config, needs(self._config, self._config.threads)
        self._placement = await self._reserve(wanted)
        actor: Any = ray.remote(Rank)
        for rank, bundle in enumerate(self._nearest_first()):
            at = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
            self._ranks.append(
                actor.options(
                    num_cpus=wanted.get("CPU", 0.0),
                    num_gpus=wanted.get("GPU", 0.0),
                    scheduling_strategy=at,
                    max_concurrency=8,
                ).remote(self._role, config, rank)
            )
        first, *others = self._ranks
        meeting = await self._result(0, first.meeting.remote())
        await asyncio.gather(*(self._result(rank, it.join.remote(meeting)) for rank, it in enumerate(self._ranks)))
        calls = [first.serve.remote(self._redis_url), *(it.follow.remote() for it in others)]
        self._running = [asyncio.ensure_future(self._result(rank, call)) for rank, call in enumerate(calls)]
        address: str = await self._unless_ended(first.listening.remote())
        self.was_ready = True
        return address

    async def ended(self) -> None:
        """Wait until all ranks have ended. Raises the error of a rank that fails, and Unavailable when one is lost."""
        await asyncio.wait(self._running, return_when=asyncio.FIRST_EXCEPTION)
        for ended in self._running:
            if ended.done():
                ended.result()

    async def drain(self) -> None:
        """Stop rank 0, and with it the others, and wait for their end, up to the drain time."""
        if not self.was_ready:
            return
        self._ranks[0].stop.remote()
        await asyncio.wait(self._running, timeout=self._config.drain_s + GRACE_S)

    async def kill(self) -> None:
        """Kill the ranks that still run, and remove their placement group."""
        import ray

        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for rank in self._ranks:
            ray.kill(rank)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)

    async def _reserve(self, wanted: dict[str, float]) -> PlacementGroup:
        """Reserve the resources of all ranks. Raises ConfigError if they do not fit, Unavailable after PLACE_S."""
        import ray

        config, bundle = self._config, wanted or {"CPU": 0.001}  # Ray accepts no empty bundle
        await find_room(bundle, config.tensor_parallel, "tensor_parallel: ranks", config.join_s)
        placement: PlacementGroup = ray.util.placement_group(
            [bundle] * config.tensor_parallel, strategy="SPREAD" if config.spread else "PACK"
        )
        try:
            async with asyncio.timeout(PLACE_S):
                await asyncio.wrap_future(placement.ready().future())
        except TimeoutError:
            ray.util.remove_placement_group(placement)
            raise Unavailable(
                f"tensor_parallel: the Ray cluster has no room for {config.tensor_parallel} ranks now: others use it"
            ) from None
        return placement

    def _nearest_first(self) -> list[int]:
        """Return the indices of the bundles, those on this node first: other servers look for rank 0 on this node."""
        import ray

        nodes: dict[int, str] = ray.util.placement_group_table(self._placement)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        return sorted(nodes, key=lambda bundle: (nodes[bundle] != here, bundle))

    async def _unless_ended(self, call: Any) -> Any:
        """Return the result of a call to rank 0. Raises the error of a rank that ends before."""
        waiting = asyncio.ensure_future(self._result(0, call))
        try:
            await asyncio.wait([waiting, *self._running], return_when=asyncio.FIRST_COMPLETED)
            for ended in self._running:
                if ended.done():
                    ended.result()
            return await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _result(self, rank: int, call: Any) -> Any:
        """Return the result of a call to a rank. Raises the call's OutriderError, and Unavailable for a lost rank."""
        import ray

        try:
            return await asyncio.wrap_future(call.future())
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, OutriderError) else error from None
        except ray.exceptions.RayActorError as error:
            raise Unavailable(f"{self._role}: rank {rank} is lost: {str(error).splitlines()[0]}") from None


class Rank:
    """One rank of a worker, as an actor on Ray."""

    def __init__(self, role: Role, config: WorkerConfig, rank: int) -> None:
        forbid_core_dumps()
        process_env.set_variables(config.threads)  # before torch is loaded
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._service, self._loading = map(import_module, SERVICES[role])
        self._config = config
        self._rank = rank
        self._listening: asyncio.Future[str]
        self._serving: asyncio.Task[None] | None = None
        self._group: Group

    async def meeting(self) -> str:
        """Return the rendezvous of the ranks: a free port of this rank's node, and a secret."""
        self._listening = asyncio.get_running_loop().create_future()
        host = self._host()
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}#{secrets.token_hex(16)}"

    async def join(self, meeting: str) -> None:
        """Connect this rank with the others at the rendezvous."""
        from outrider.engine.loading import connect_ranks
        from outrider.hub import checkpoint_folder

        config = self._config

        def connect() -> Group:
            folder, ranks = checkpoint_folder(config.model), config.tensor_parallel
            return connect_ranks(folder, config.backend, config.device, self._rank, ranks, meeting, host=self._host())

        self._group = await asyncio.to_thread(connect)

    async def follow(self) -> None:
        """Load this rank's part of the model and execute rank 0's plans until rank 0 ends."""
        from outrider.engine.tensor_parallel.leader import follow

        def load_and_follow() -> None:
            follow(self._loading.load_part(self._config, self._group), self._group)

        await _raising_user_errors(asyncio.to_thread(load_and_follow))

    async def serve(self, redis_url: str) -> None:
        """Run the worker's server until it is stopped."""
        config = self._config
        if config.ray is not None:
            config = config.model_copy(update={"listen": public(config.listen)})
        self._serving = asyncio.ensure_future(
            self._service.run(config, redis_url, announce=self._listening.set_result, group=self._group)
        )
        with suppress(asyncio.CancelledError):
            await _raising_user_errors(self._serving)

    async def listening(self) -> str:
        """Wait until this rank serves, and return its address."""
        return await self._listening

    def _host(self) -> str:
        """Return the host at which the other ranks reach this one: the loopback, or the address of its node."""
        return "127.0.0.1" if self._config.ray is None else node_address()

    async def stop(self) -> None:
        """Make the server drain and end."""
        if self._serving is not None:
            self._serving.cancel()


async def _raising_user_errors(work: Any) -> None:
    """Await `work`. If it fails with a group of errors, raise the one that the user can correct, if there is one."""
    try:
        await work
    except Exception as error:
        raise user_error(error) or error from None
