"""A cluster for each way to draft, with two verifiers and two routers, so that one of either may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process
from tests.drafter.other_tokenizer import make_other
from tests.e2e.conftest import MODELS, ROOT
from tests.e2e.mini_router import described
from tests.e2e.test_tools import TEMPLATE
from tests.engine.small_adapters import make_adapter
from tests.engine.small_checkpoints import pad_vocabulary
from tests.engine.taught import greedy, taught_heads

ADAPTERS = ("a", "b")
SLOTS = 16  # of a worker: all streams of a cell, those of a killed verifier too
LEASE_S = 2.0  # a router that is silent for this time is taken for dead
READY_S = 30.0  # for the routers to see all workers
PADDED = 4224  # ids of the padded drafter
TAUGHT = 160  # tokens of the text that heads know


class Checkpoints:
    """Made in `folder`, each when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def prompt(self) -> str:
        """A short held-out text."""
        with (ROOT / "examples" / "held_out.jsonl").open(encoding="utf-8") as lines:
            return str(json.loads(next(lines))["prompt"])

    @cached_property
    def tokens(self) -> list[int]:
        """The prompt in the target's tokens."""
        return Tokenizer.from_file(str(self.target / "tokenizer.json")).encode(self.prompt).ids

    @cached_property
    def target(self) -> Path:
        """The reference target, with a chat template."""
        folder = self._folder / "target"
        folder.mkdir()
        for file in (MODELS / "target").iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        return folder

    @cached_property
    def adapters(self) -> Path:
        """Adapters of all its linears, which change its text but not beyond recognition."""
        for seed, name in enumerate(ADAPTERS):
            make_adapter(self.target, self._folder / "adapters" / name, seed=seed, deviation=0.1)
        return self._folder / "adapters"

    @cached_property
    def padded(self) -> Path:
        """The drafter with ids that the tokenizer does not have, which it prefers."""
        return pad_vocabulary(MODELS / "drafter", self._folder / "padded", PADDED, loudness=1.05)

    @cached_property
    def other(self) -> Path:
        """The drafter with another tokenizer."""
        return make_other(self._folder / "other")

    @cached_property
    def heads(self) -> Path:
        """EAGLE heads that know the target's greedy text after the prompt."""
        return self._taught("eagle")

    @cached_property
    def remote_heads(self) -> Path:
        """EAGLE-3 heads that know it."""
        return self._taught("eagle-3")

    def _taught(self, kind: Any) -> Path:
        folder = self._folder / kind
        folder.mkdir()
        taught_heads(kind, self.target, folder, greedy(self.target, self.tokens, TAUGHT))
        return folder


def config_of(drafting: str, made: Checkpoints) -> ClusterConfig:
    """The cluster. Its drafters always draft, however fast the target is."""
    drafter = DrafterConfig(model=MODELS / "drafter", dtype="float32", slots=SLOTS)
    drafters: list[DrafterConfig] = []
    tiers: dict[int, list[DrafterConfig]] = {}
    verifying: dict[str, Any] = {}
    match drafting:
        case "model":
            drafters = [drafter]
        case "padded vocabulary":
            drafters = [drafter.model_copy(update={"model": made.padded})]
        case "another tokenizer":
            drafters = [drafter.model_copy(update={"model": made.other, "target": made.target})]
        case "suffix":
            verifying = {"lookup": "suffix"}
        case "heads":
            verifying = {"heads": made.heads}
        case "remote heads":
            verifying = {"features": made.remote_heads}
            drafters = [drafter.model_copy(update={"model": made.target, "heads": made.remote_heads})]
        case "two drafters":
            drafters = [drafter, drafter.model_copy(update={"model": made.target})]
        case "tiers":
            tiers = {0: [drafter.model_copy(update={"model": MODELS / "mid"})], 1: [drafter]}
    verifier = VerifierConfig(
        model=made.target,
        dtype="float32",
        numerics="invariant",
        slots=SLOTS,
        adapters=made.adapters,
        max_adapters=len(ADAPTERS),
        **verifying,
    )
    return ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0",
            models={"target": made.target},
            overlap=True,
            tiers="all",
            drafters_per_session=max(1, len(drafters)),
            lease_s=LEASE_S,
            adapter_loaders=("*",),
        ),
        verifier=[verifier, verifier],
        drafter=drafters,
        tier=tiers,
    )


class MatrixCluster:
    """A running cluster whose servers may be killed, and are started again."""

    def __init__(self, config: ClusterConfig, forward: Callable[[str, str], None] = lambda name, line: None) -> None:
        self._cluster = LocalCluster(config, forward=forward)
        self._second = Process("router", "router-b", config.router, forward)
        self._verifiers: dict[str, Process] = {}  # by worker id
        self._killed: list[Process] = []
        self._stack = AsyncExitStack()

    def client(self) -> outrider.AsyncClient:
        """A client that talks to the first router, and to the second one when that has ended."""
        return outrider.AsyncClient(f"ipv4:{self._first.address},{self._second.address}")

    def kill_verifier(self, worker_id: str) -> None:
        """Sends SIGKILL to a verifier."""
        self._kill(self._verifiers[worker_id])

    def kill_router(self) -> None:
        """Sends SIGKILL to the router that clients talk to."""
        self._kill(self._first)

    async def restore(self) -> list[str]:
        """Starts again what has ended, and waits until the routers see all of it. Return the names of those that were
        not killed."""
        killed, self._killed = self._killed, []
        for process in killed:
            await process.wait()
        ended = [one for one in (*self._cluster.processes.values(), self._second) if one.status is not None]
        for process in ended:
            await process.start(self._cluster.redis_url_of(process.role))
        verifiers = [one for one in self._cluster.processes.values() if one.role == "verifier"]
        self._verifiers = {(await described(one.address)).worker_id: one for one in verifiers}
        drafters = sum(process.role == "drafter" for process in self._cluster.processes.values())
        for router in (self._first, self._second):
            async with outrider.AsyncClient(router.address) as client, asyncio.timeout(READY_S):
                while not _complete((await client.models())[0], len(verifiers), drafters):
                    await asyncio.sleep(0.05)
        return [process.name for process in ended if process not in killed]

    def _kill(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        self._killed.append(process)

    @property
    def _first(self) -> Process:
        return self._cluster.processes["router"]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._cluster)
            stack.push_async_callback(self._second.stop)
            await self._second.start(self._cluster.redis_url_of("router"))
            await self.restore()
            async with self.client() as client:
                for name in ADAPTERS:
                    await client.load_adapter(name, name)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


def _complete(model: outrider.Model, verifiers: int, drafters: int) -> bool:
    return model.verifiers >= verifiers and model.drafters >= drafters
