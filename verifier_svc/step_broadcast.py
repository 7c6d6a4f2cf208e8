"""Streams each step of a session to its watchers: the tree as it was verified, and the accepted nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import StepReport
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code
from outrider.draft_server.draft_session import DraftedSession
from outrider.rpc.codec import plan_to_pb, report_to_pb
from outrider.v1 import types_pb2

MAX_QUEUED = 64  # steps that are queued for a slow watcher


class StepBroadcast:
    """The watchers of one session."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Queue[types_pb2.StepTree | None], int] = {}  # with the steps each has missed
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether there are watchers."""
        return bool(self._watchers)

    async def steps(self) -> AsyncGenerator[types_pb2.StepTree, None]:
        """Yields the steps from now on, until the session ends."""
        queue: asyncio.Queue[types_pb2.StepTree | None] = asyncio.Queue()  # bounded by `show`
        self._watchers[queue] = 0
        try:
            while not (self._closed and queue.empty()) and (step := await queue.get()) is not None:
                yield step
        finally:
            self._watchers.pop(queue, None)

    def show(self, shown: types_pb2.StepTree) -> None:
        """Queues a step for each watcher."""
        for queue, missed in self._watchers.items():
            if queue.qsize() >= MAX_QUEUED:
                self._watchers[queue] = missed + 1
                continue
            step = types_pb2.StepTree()
            step.CopyFrom(shown)
            step.missed, self._watchers[queue] = missed, 0
            queue.put_nowait(step)

    def close(self) -> None:
        """Ends all streams, after the steps that are queued."""
        self._closed = True
        for queue in self._watchers:
            queue.put_nowait(None)


def step_tree(
    session: DraftedSession,
    nodes: Sequence[Node],
    parents: Sequence[int],
    path: Sequence[Node],
    choices: Sequence[Choice],
    report: StepReport,
) -> types_pb2.StepTree:
    """Return what a watcher sees of a step that verified `nodes` and accepts `path`, before the tree is re-rooted."""
    accepted = set(path)
    drafters = {it.sender: stream.drafter_id for stream, it in session.subscriptions.items()}
    drafters |= {sender: name for name, sender in session.origins.items()}
    numbers = {sender: number for number, sender in enumerate(drafters, 1)}
    return types_pb2.StepTree(
        position=len(session.tokens),
        committed=[choice.token for choice in choices],
        tokens=[node.token for node in nodes],
        parents=parents,
        edges=bytes(edge_code(node.edge) for node in nodes),
        accepted=[at for at, node in enumerate(nodes) if node in accepted],
        drafters=drafters.values(),
        senders=[
            min((numbers.get(sender, 0) for sender in session.tree.ids.origins(node)), default=0) for node in nodes
        ],
        left_out=session.tree.size - len(nodes),
        report=report_to_pb(report),
        plan=plan_to_pb(session.terms.plan),
    )
