"""Ours in one process: the verifier's step loop and the drafter's grower on one event loop, joined by calls.

What `outrider.sink` and `drafter_svc.upstream` do over a stream is done here at once: nodes are grafted where
they are proposed, commits are heard where they are made. Credit, plans and prices hold as on the wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from bench.asking import Ask
from drafter_svc.grower import Grower
from drafter_svc.replica import Snapshot, Update
from drafter_svc.service import load_part as load_draft
from drafter_svc.upstream import Attachment
from outrider.cli.samples import Sample
from outrider.config import ClusterConfig
from outrider.core.calibration import Calibration
from outrider.core.contract import Contract, Overlap, Plan, PolicyName
from outrider.core.control import policy
from outrider.core.tree import Delta, Drifted
from outrider.engine.threads import briefly
from outrider.errors import InternalError
from outrider.sink.drafted import Subscription
from outrider.sink.stream import DraftStream
from verifier_svc.loop import StepLoop
from verifier_svc.service import load as load_target
from verifier_svc.session import Commit, Session, Start


class _Ear(DraftStream):
    """The drafter's end, of which the step loop knows one thing: that a session is over for it."""

    def __init__(self, pair: Pair) -> None:
        super().__init__("local", pair.loop.progress.heartbeat)
        self._pair = pair

    def close(self, attachment: int, reason: str) -> None:
        self._pair.grower.closed(self._pair.key)


class Pair:
    """One target and one drafter, one session at a time. Lives on the event loop that makes it."""

    def __init__(self, config: ClusterConfig) -> None:
        (verifier,), (drafter,) = config.verifier, config.drafter
        target, cost = briefly(partial(load_target, verifier))
        self._router = config.router
        self.loop = StepLoop(
            target,
            cost,
            prefill_chunk=verifier.prefill_chunk,
            max_nodes=verifier.max_nodes,
            publish=self._publish,
        )
        self.grower = Grower(
            briefly(partial(load_draft, drafter)),
            level_nodes=drafter.level_nodes,
            prefill_chunk=drafter.prefill_chunk,
            send=self._send,
            resync=lambda key: self._snapshot(),
            tree=drafter.tree,
        )
        self.key = Attachment("", "", 1, b"")
        self._ear = _Ear(self)
        self._calibration = Calibration()
        self._subscription: Subscription | None = None
        self._sessions = 0
        self._tasks = [asyncio.create_task(self.loop.run()), asyncio.create_task(self.grower.run())]
        for task in self._tasks:
            task.add_done_callback(self._broke)

    async def generate(self, ask: Ask, speculation: PolicyName | None = None) -> Sample:
        """One generation. Raises InternalError when a loop has ended."""
        began = time.perf_counter()
        config = self._router
        ceilings = Plan(0, config.depth, config.width, config.nodes, config.wait_us, Overlap.NEVER)
        gamma = policy(speculation or config.policy, ceilings)
        self._sessions += 1
        contract = Contract(ask.seed, ask.max_tokens, temperature=ask.temperature)
        name, plan, window = f"local-{self._sessions}", gamma.plan(), config.window
        session = self.loop.open(Start(name, "", 1, ask.prompt, len(ask.prompt), contract, plan, window))
        self.key = Attachment(name, "", 1, b"")
        tokens: list[int] = []
        arrivals: list[float] = []
        steps = 0
        try:
            if plan.depth:
                self._subscription = session.subscribe(self._ear, 1, self._calibration)
                self._snapshot()
            while (commit := await self._next(session)) is not None:
                tokens += [choice.token for choice in commit.choices]
                arrivals += [time.perf_counter() - began] * len(commit.choices)
                steps += 1
                if commit.last:
                    break
                session.durable = len(session.tokens)
                gamma.observe(commit.report)
                if gamma.plan().version > session.plan.version:
                    session.plan = gamma.plan()
                    self._tell()
                self.loop.wake()
        finally:
            self.loop.close(session)
            self._subscription = None
        return Sample(tuple(tokens), tuple(arrivals), steps)

    async def close(self) -> None:
        """Ends both loops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self, session: Session) -> Commit | None:
        commit = await session.commits.get()
        for task in self._tasks:
            if task.done():
                raise InternalError("a loop of the pair has ended") from task.exception()
        return commit

    def _broke(self, task: asyncio.Task[None]) -> None:
        for session in self.loop.sessions.values():
            session.commits.put_nowait(None)

    def _publish(self, session: Session, position: int, tokens: Sequence[int]) -> None:
        if self._subscription is not None:
            self._tell(position, tuple(tokens))

    def _tell(self, position: int | None = None, tokens: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> None:
        """What the sink says in a Commit frame."""
        assert self._subscription is not None
        session = self._subscription.session
        plan = None
        if self._subscription.plan_version != session.plan.version:
            plan = session.ceilings
            self._subscription.plan_version = session.plan.version
        credit = session.grant(self._subscription)
        place = len(session.tokens) if position is None else position
        terms = session.price, session.time_price, session.ahead
        self.grower.updated(self.key, Update(place, tokens, session.tree.digest, plan, *terms, credit, dropped))

    def _snapshot(self) -> None:
        if self._subscription is None:
            return
        session = self._subscription.session
        self._subscription.plan_version = session.plan.version
        self.grower.opened(
            self.key,
            Snapshot(
                tuple(session.tokens),
                session.tree.digest,
                session.contract,
                session.ceilings,
                session.grant(self._subscription),
                session.price,
                session.time_price,
                answer_position=session.answer_position,
                epoch=session.epoch,
            ),
        )

    def _send(self, key: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """What the sink does with a TreeDelta frame."""
        if key is not self.key or self._subscription is None:
            return  # the session ended while the level ran
        session = self._subscription.session
        try:
            now = time.monotonic()
            dropped = session.graft(self._subscription, delta, now, passing=self.loop.progress.running)
        except Drifted:
            self._snapshot()
            return
        if exhausted:
            self._subscription.exhausted = delta.root_position
        for identities in dropped.values():
            self._tell(dropped=tuple(identities))
        self.loop.wake()
