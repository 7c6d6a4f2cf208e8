"""The shapes of running generations' token trees, for the live page: what a step verified, and what it accepted.

No token and no text is in them. A generation is watched while its tree is asked for, and a few seconds longer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from outrider.core.tree.score_codec import edge_from_code
from outrider.errors import OutriderError, Unavailable
from outrider.telemetry.loop_probe import answer_of
from outrider.telemetry.pages import PageContent
from outrider.wire import types as wire
from router.sessions.generation import OwnedGeneration

ID_CHARACTERS = 8  # of a session's id, as the page shows it: enough to tell ids apart, too few to resume it
MAX_WATCHED = 8  # generations at a time
UNASKED_S = 5.0  # stop watching a tree that was not requested for this long
CHECK_S = 1.0  # interval of the search for such trees
ANSWER_S = 2.0  # timeout of the event loop's answer to a page

Shape = dict[str, Any]
Steps = Callable[[str, str], AsyncGenerator[wire.StepTree, None]]  # of a tenant's session


@dataclass(slots=True)
class _WatchedTree:
    task: asyncio.Task[None]
    asked_at: float
    shape: Shape = field(default_factory=dict)


class TreeView:
    """The trees that are looked at. Its `run` must run on the router's event loop."""

    def __init__(self, steps: Steps, running: Callable[[], Iterable[OwnedGeneration]]) -> None:
        self._steps = steps
        self._running = running
        self._watched: dict[str, _WatchedTree] = {}  # by the beginning of a session's id
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Watch what is asked for, until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                for watched in self._watched.values():
                    if watched.asked_at + UNASKED_S < self._loop.time():
                        watched.task.cancel()
        finally:
            self._loop = None
            tasks = [watched.task for watched in self._watched.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def page(self, name: str) -> PageContent:
        """Return the latest shape of a generation's tree, as JSON; a `problem` instead where there is none.

        Called in another thread. Raises Unavailable if the event loop does not answer in time.
        """
        if self._loop is None:
            raise Unavailable("the router starts or ends")
        shape = answer_of(self._loop, self._look(name), ANSWER_S)
        return PageContent("application/json", json.dumps(shape).encode())

    async def _look(self, name: str) -> Shape:
        watched = self._watched.get(name)
        now = asyncio.get_running_loop().time()
        if watched is None:
            found = (one for one in self._running() if one.session_id[:ID_CHARACTERS] == name)
            if (generation := next(found, None)) is None:
                return {"problem": "this generation has ended, or runs at another router"}
            if len(self._watched) >= MAX_WATCHED:
                return {"problem": f"{MAX_WATCHED} trees are looked at already; close one"}
            task = asyncio.create_task(self._watch(name, generation.tenant, generation.session_id))
            watched = self._watched[name] = _WatchedTree(task, now)
        watched.asked_at = now
        return watched.shape

    async def _watch(self, name: str, tenant: str, session_id: str) -> None:
        watched = self._watched[name]
        try:
            async with aclosing(self._steps(tenant, session_id)) as steps:
                async for step in steps:
                    watched.shape = shape_of(step)
        except OutriderError as error:
            watched.shape = {"problem": str(error)}
        finally:
            del self._watched[name]


def shape_of(step: wire.StepTree) -> Shape:
    """Return the shape of a step's tree.

    A node is [parent, chance, accepted, sender]: parent -1 is the root, sender 0 the verifier, others are drafters.
    """
    accepted = set(step.accepted)
    return {
        "position": step.position,
        "committed": len(step.committed),
        "accepted": len(accepted),
        "left_out": step.left_out,
        "hidden": step.hidden,
        "pass_ms": step.report.forward_us / 1e3,
        "waited_ms": step.report.waited_us / 1e3,
        "gamma": step.plan.depth,
        "drafters": list(step.drafters),
        "nodes": [
            [parent - 1, round(math.exp(edge_from_code(edge)), 3), at in accepted, sender]
            for at, (parent, edge, sender) in enumerate(zip(step.parents, step.edges, step.senders, strict=True))
        ],
    }
