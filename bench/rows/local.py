"""Outrider in one process: the verifier's and the drafter's schedulers on one event loop, connected by calls.

What `outrider.upstream` and `drafter_svc.upstreams` do over a stream is done here at once: nodes are grafted
where they are proposed, commits are received where they are made. Credit, plans and terms work as on the wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from bench.rows.requests import BenchRequest
from drafter_svc.loading import load_part as load_draft
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.upstreams.upstream import Attachment
from outrider.cli.performance.samples import Sample
from outrider.config import ClusterConfig
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.depth.policies import policy
from outrider.core.session.contract import Contract, Plan, PlanOverlap, PolicyName
from outrider.core.session.decoding import PromptScores
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta, DigestMismatch
from outrider.engine.threads import run_in_short_lived_thread
from outrider.errors import InternalError
from outrider.upstream.upstream_session import Subscription, UpstreamStream
from verifier_svc.commit_queue import StepCommit
from verifier_svc.scheduler import StepScheduler
from verifier_svc.server import load as load_target
from verifier_svc.session import SessionStart, VerifierSession


class _LocalStream(UpstreamStream):
    """The drafter's stream. The verifier's scheduler uses it only to close a session for the drafter."""

    def __init__(self, pair: LocalPair) -> None:
        super().__init__("local", pair.loop.progress.heartbeat)
        self._pair = pair

    def close(self, attachment: int, reason: str) -> None:
        self._pair.scheduler.closed(self._pair.key)


class LocalPair:
    """One target and one drafter, with one session at a time. It runs on the event loop that creates it."""

    def __init__(self, config: ClusterConfig) -> None:
        (verifier,), (drafter,) = config.verifier, config.drafter
        target, cost = run_in_short_lived_thread(partial(load_target, verifier))
        self._router = config.router
        self.loop = StepScheduler(
            target,
            cost,
            prefill_chunk=verifier.prefill_chunk,
            max_nodes=verifier.max_nodes,
            publish=self._publish,
        )
        self.scheduler = DraftScheduler(
            run_in_short_lived_thread(partial(load_draft, drafter)),
            level_nodes=drafter.level_nodes,
            prefill_chunk=drafter.prefill_chunk,
            send=self._send,
            resync=lambda key: self._snapshot(),
            tree=drafter.tree,
        )
        self.key = Attachment("", "", 1, b"")
        self._stream = _LocalStream(self)
        self._calibration = Calibration()
        self._subscription: Subscription | None = None
        self._sessions = 0
        self._tasks = [asyncio.create_task(self.loop.run()), asyncio.create_task(self.scheduler.run())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def generate(self, request: BenchRequest, speculation: PolicyName | None = None) -> Sample:
        """Run one generation. Raises InternalError when a scheduler has ended."""
        began = time.perf_counter()
        config = self._router
        ceilings = Plan(0, config.depth, config.width, config.nodes, config.wait_us, PlanOverlap.NEVER)
        gamma = policy(speculation or config.policy, ceilings)
        self._sessions += 1
        contract = Contract(request.seed, request.max_tokens, temperature=request.temperature)
        name, plan, window = f"local-{self._sessions}", gamma.plan(), config.window
        session = self.loop.sessions.open(
            SessionStart(name, "", 1, request.prompt, len(request.prompt), contract, plan, window)
        )
        self.key = Attachment(name, "", 1, b"")
        tokens: list[int] = []
        arrivals: list[float] = []
        steps = 0
        try:
            if plan.depth:
                self._subscription = session.subscribe(self._stream, 1, self._calibration)
                self._snapshot()
            while (commit := await self._next(session)) is not None:
                tokens += [choice.token for choice in commit.choices]
                arrivals += [time.perf_counter() - began] * len(commit.choices)
                steps += 1
                if commit.last:
                    break
                session.commits.acknowledge(len(session.tokens))
                gamma.observe(commit.report)
                if gamma.plan().version > session.terms.plan.version:
                    session.terms.plan = gamma.plan()
                    self._send_commit()
                self.loop.wake()
        finally:
            self.loop.sessions.close(session)
            self._subscription = None
        return Sample(tuple(tokens), tuple(arrivals), steps)

    async def close(self) -> None:
        """End both schedulers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self, session: VerifierSession) -> StepCommit | None:
        commit = await session.commits.get()
        assert not isinstance(commit, PromptScores)  # none are wanted
        for task in self._tasks:
            if task.done():
                raise InternalError("a loop of the pair has ended") from task.exception()
        return commit

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        for session in self.loop.sessions.values():
            session.commits.close()

    def _publish(self, session: VerifierSession, position: int, tokens: Sequence[int]) -> None:
        if self._subscription is not None:
            self._send_commit(position, tuple(tokens))

    def _send_commit(
        self, position: int | None = None, tokens: tuple[int, ...] = (), dropped: tuple[int, ...] = ()
    ) -> None:
        """Do what the draft server does with a Commit frame."""
        assert self._subscription is not None
        session = self._subscription.session
        plan = None
        if self._subscription.plan_version != session.terms.plan.version:
            plan = session.ceilings
            self._subscription.plan_version = session.terms.plan.version
        credit = session.grant(self._subscription)
        place = len(session.tokens) if position is None else position
        terms = session.terms.sent
        self.scheduler.updated(self.key, MirrorUpdate(place, tokens, session.tree.digest, plan, terms, credit, dropped))

    def _snapshot(self) -> None:
        if self._subscription is None:
            return
        session = self._subscription.session
        self._subscription.plan_version = session.terms.plan.version
        self.scheduler.opened(
            self.key,
            MirrorSnapshot(
                tuple(session.tokens),
                session.tree.digest,
                session.contract,
                session.ceilings,
                session.grant(self._subscription),
                session.terms.sent,
                answer_position=session.answer_position,
                epoch=session.epoch,
            ),
        )

    def _send(self, key: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """Do what the draft server does with a TreeDelta frame."""
        if key is not self.key or self._subscription is None:
            return  # the session ended while the level ran
        session = self._subscription.session
        try:
            now = time.monotonic()
            dropped = session.graft(self._subscription, delta, now, passing=self.loop.progress.running)
        except DigestMismatch:
            self._snapshot()
            return
        if exhausted:
            self._subscription.exhausted = delta.root_position
        for identities in dropped.values():
            self._send_commit(dropped=tuple(identities))
        self.loop.wake()
