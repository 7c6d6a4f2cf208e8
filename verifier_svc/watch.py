"""Who watches a session sees each of its steps: the tree as it was verified, and what was accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from outrider.core.contract import StepReport
from outrider.core.edges import edge_code
from outrider.core.sampler import Choice
from outrider.core.tree import Node
from outrider.rpc.codec import plan_to_pb, report_to_pb
from outrider.v1 import types_pb2

if TYPE_CHECKING:
    from verifier_svc.step import Work

MOST_WAITING = 64  # steps that are kept for one who does not keep up


class Watch:
    """Of one session."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Queue[types_pb2.StepTree | None], int] = {}  # and how many steps each has missed
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody does."""
        return bool(self._watchers)

    async def steps(self) -> AsyncGenerator[types_pb2.StepTree, None]:
        """The steps from now on, until the session ends."""
        queue: asyncio.Queue[types_pb2.StepTree | None] = asyncio.Queue()  # bounded by `show`
        self._watchers[queue] = 0
        try:
            while not (self._closed and queue.empty()) and (step := await queue.get()) is not None:
                yield step
        finally:
            self._watchers.pop(queue, None)

    def show(self, work: Work, path: Sequence[Node], choices: Sequence[Choice], report: StepReport) -> None:
        """Shows a step that accepts `path`, before the tree is re-rooted."""
        shown = _step_tree(work, path, choices, report)
        for queue, missed in self._watchers.items():
            if queue.qsize() >= MOST_WAITING:
                self._watchers[queue] = missed + 1
                continue
            step = types_pb2.StepTree()
            step.CopyFrom(shown)
            step.missed, self._watchers[queue] = missed, 0
            queue.put_nowait(step)

    def close(self) -> None:
        """There are no more."""
        self._closed = True
        for queue in self._watchers:
            queue.put_nowait(None)


def _step_tree(work: Work, path: Sequence[Node], choices: Sequence[Choice], report: StepReport) -> types_pb2.StepTree:
    session, nodes, accepted = work.session, work.nodes, set(path)
    drafters = {own.sender: stream.drafter_id for stream, own in session.subscriptions.items()}
    drafters |= {sender: name for name, sender in session.origins.items()}
    numbers = {sender: number for number, sender in enumerate(drafters, 1)}
    return types_pb2.StepTree(
        position=len(session.tokens),
        committed=[choice.token for choice in choices],
        tokens=[node.token for node in nodes],
        parents=work.parents,
        edges=bytes(edge_code(node.edge) for node in nodes),
        accepted=[at for at, node in enumerate(nodes) if node in accepted],
        drafters=drafters.values(),
        senders=[min((numbers.get(sender, 0) for sender in session.tree.origins(node)), default=0) for node in nodes],
        left_out=session.tree.size - len(nodes),
        report=report_to_pb(report),
        plan=plan_to_pb(session.plan),
    )
