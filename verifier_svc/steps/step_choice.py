"""Chooses what a verifier's step does: which sessions it serves, which nodes it verifies, how long it is delayed."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

from outrider.core.control.cost.budget import COST, CostModel, VerificationBudget, choose_budget
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from verifier_svc.batch import SessionWork, StepBatch
from verifier_svc.kv_memory import KvMemory
from verifier_svc.open_sessions import OpenSessions
from verifier_svc.proposers.lookahead import look_ahead
from verifier_svc.session import PrefillSession, VerifierSession
from verifier_svc.steps.step_learning import StepLearning

FAIR_SHARES = 2  # equal shares of a step's nodes that one session may have: overrated drafts starve no other session
LEAST_SHARE = 4
GRAMMARS_S = 0.01  # seconds that a step waits for grammars' processes
SLOWER = 2.0  # times as long as without it may a step be for another tenant's prompt
LEAST_CHUNK = 16  # tokens that a step reads in any case
SCORED_LOGITS = 2**23  # of a step, from which log-probabilities of prompts are computed; a row of a session in any case


class PrefillOrder:
    """The order in which sessions get a part of a step's prefill chunk: fair shares between tenants, so that one's long
    prompts do not hold up the others'.

    The tenant comes first of whose prompts the fewest tokens were read, and within a tenant the session that was opened
    first. A tenant that had nothing to read starts at the lowest count of those that have, so that nobody saves up
    credit (Sheng et al., arXiv 2401.00588, algorithm 2). Texts that are only prefilled come last.
    """

    def __init__(self) -> None:
        self._read: dict[str, int] = {}  # tokens, by tenant with a prompt to read

    def sort(self, ready: Iterable[VerifierSession]) -> list[VerifierSession]:
        """Return the sessions in that order; those that only decode come where they may."""
        sessions = list(ready)
        reading = {session.tenant for session in sessions if session.unread > 1}
        lowest = min((self._read[tenant] for tenant in reading & self._read.keys()), default=0)
        self._read = {tenant: self._read.get(tenant, lowest) for tenant in reading}
        return sorted(sessions, key=lambda one: (isinstance(one, PrefillSession), self._read.get(one.tenant, 0)))

    def add(self, tenant: str, tokens: int) -> None:
        """Count tokens of a tenant's prompt as read."""
        if tenant in self._read:
            self._read[tenant] += tokens


class StepChoice:
    """Chooses the next step by what earlier ones have shown. `changed` is set when another choice may be better."""

    def __init__(
        self,
        executor: Executor,
        sessions: OpenSessions,
        learning: StepLearning,
        changed: asyncio.Event,
        *,
        prefill_chunk: int,
        max_nodes: int,
    ) -> None:
        self.begun: StepBatch | None = None  # the step whose pass the engine has begun by itself
        self.prefill_order = PrefillOrder()
        self.memory = KvMemory(executor, sessions.slots, max_nodes)
        self._executor = executor
        self._sessions = sessions
        self._learning = learning
        self._changed = changed
        self._prefill_chunk = prefill_chunk
        self._max_nodes = 0 if executor.engine.treeless else max_nodes

    async def follow_grammars(self) -> None:
        """Wait a moment for what grammars force behind the latest commits. Sessions whose grammars take longer join a
        later step."""
        ends = time.monotonic() + GRAMMARS_S
        while late := [grammar for it in self._sessions.values() if (grammar := it.awaited_grammar) is not None]:
            left = ends - time.monotonic()
            if left <= 0.0:
                for grammar in late:
                    grammar.mark_slow()
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def choose(self) -> StepBatch:
        """Return the next step: the best nodes of all trees.

        Wait until a session is ready, and then for as long as a better tree is worth more than the time.
        """
        waited, back_to_back = 0.0, bool(self._learning.pass_ended)
        incomplete: VerifierSession | None = None  # a session whose plan forbids a step over its present tree
        while True:
            await self.memory.prepare()
            self._changed.clear()
            self._sessions.close_due()
            if (begun := self._begun_step()) is not None:
                return begun
            ready = self.prefill_order.sort(self.memory.schedulable(self._sessions.values()))
            for session in ready:
                session.propose_forced()
            if not ready:
                self._learning.learn_latest(self._sessions.values())
                back_to_back = False
                await self._executor.wait_idle(self._changed)
                continue
            now = time.monotonic()
            works = self.base_works(ready)
            may_hold = self._max_nodes and all(work.chooses for work in works)  # no prompt is read in this step
            hold = 0.0
            if may_hold:  # the session that held the step back is asked first: each of its deltas leads here
                sessions = sorted((work.session for work in works), key=lambda session: session is not incomplete)
                incomplete, hold = self._learning.hold_policy.required_hold(sessions, now)
            if hold <= 0.0:
                step, budget = self.select(works, now)
                lately = self._learning.steering.tokens_per_s
                hold = self._learning.hold_policy.hold_seconds(step.sessions, budget, now, lately) if may_hold else 0.0
                if hold <= 0.0:
                    step.waited, step.back_to_back = waited, back_to_back
                    return step
            held = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(hold):
                    await self._changed.wait()
            waited += time.monotonic() - held

    def select(self, works: list[SessionWork], now: float) -> tuple[StepBatch, VerificationBudget]:
        """Add the best nodes of all trees to the works. Return the step, and the budget that it keeps to."""
        cost, times = self._learning.cost, self._learning.times
        base = sum(work.end - work.start for work in works)
        rows: dict[Node, int] = {}
        decoding = [work for work in works if work.chooses]
        certain = len(decoding) + self._add_full_trees(decoding, rows)
        base += len(rows)
        deciding = [work for work in decoding if not work.session.terms.takes_full_tree]
        share = max(LEAST_SHARE, FAIR_SHARES * self._max_nodes // max(1, len(deciding)))
        offers = [_offers(work, min(share, work.session.ceilings.nodes)) for work in deciding]
        ranked = list(itertools.islice(heapq.merge(*offers, key=_score_of), self._max_nodes))
        # An idle scheduler has not waited for this step.
        passed = min(now - self._learning.pass_ended, cost.seconds(base))
        outside = max(passed, cost.overhead(len(works)))
        prompt_tokens = base - len(decoding) - len(rows)
        certain += cost.in_tokens(len(decoding), prompt_tokens)
        scores = [-negated for negated, _, _ in ranked]
        budget = choose_budget(scores, base, certain, cost, outside)
        ahead, tokens = look_ahead(deciding, base, budget, cost, times, self._max_nodes)
        if ahead:
            budget = choose_budget(scores[: self._max_nodes - ahead], base + ahead, certain + tokens, cost, outside)
        for score, work, node in ranked[: budget.nodes]:
            work.add(node, -score, rows)
        return StepBatch(works, budget.min_path_score, budget.expected / budget.seconds, prompt_tokens), budget

    def _add_full_trees(self, works: Sequence[SessionWork], rows: dict[Node, int]) -> float:
        """Add the trees that a step takes complete, level by level. Return their expected accepted tokens.

        Choosing nodes of a sampled tree by their scores would bias the text (docs/protocol.md, section 12). For the
        same reason a session is charged for the nodes that its plan allows, and not for those that it has.
        """
        expected, left = 0.0, self._max_nodes
        for work in works:
            session = work.session
            allowed = session.ceilings.nodes
            if not session.terms.takes_full_tree or allowed > left:
                continue
            left -= allowed
            for level in itertools.islice(session.tree.levels(), min(session.ceilings.depth, session.room - 1)):
                if len(work.nodes) + len(level) > allowed:
                    break
                for node in level:
                    score = session.tree.score(node)
                    expected += score
                    work.add(node, score, rows)
        return expected

    def base_works(self, ready: Sequence[VerifierSession]) -> list[SessionWork]:
        """Return the roots of all sessions that decode, and a chunk of the prompts that others have to read first."""
        works, chunk = [], chunk_beside_others(ready, self._prefill_chunk, self._learning.cost)
        logits = SCORED_LOGITS
        for session in ready:
            pending = session.unread
            taken = pending if pending == 1 else min(session.readable(max(1, logits // session.vocabulary)), chunk)
            chunk -= taken if pending > 1 else 0
            if taken:
                end = session.cached + taken
                scored = max(0, end + 1 - session.scored) if session.scoring else 0
                logits -= scored * session.vocabulary
                works.append(SessionWork(session, session.cached, end, scored=scored))
        return works

    def _begun_step(self) -> StepBatch | None:
        """Return the step whose pass the engine has begun, without the sessions that have ended since."""
        begun, self.begun = self.begun, None
        sessions = [it for it in begun.sessions if it.ready and it.unread == 1] if begun is not None else []
        if begun is None or not sessions:
            return None
        works = [SessionWork(session, session.cached, session.cached + 1) for session in sessions]
        return StepBatch(works, begun.min_path_score, begun.rate, back_to_back=True, begun=True)


def chunk_beside_others(sessions: Sequence[VerifierSession], most: int, cost: CostModel) -> int:
    """Return how many prompt tokens a step of these sessions reads, `most` at most.

    Where several tenants share the step, it takes at most SLOWER times as long as if only the tenant that needs the
    fewest rows had its prompts read, by the measured cost of passes, or reads LEAST_CHUNK tokens.
    """
    decoding, reading = Counter[str](), Counter[str]()
    for session in sessions:
        if session.unread > 1:
            reading[session.tenant] = min(most, reading[session.tenant] + session.unread)
        else:
            decoding[session.tenant] += 1
    tenants = reading.keys() | decoding.keys()
    if not reading or len(tenants) == 1:
        return most
    rows, least = decoding.total(), min(tenants, key=lambda tenant: reading[tenant] + decoding[tenant])
    bound = SLOWER * (cost.seconds(rows + reading[least]) + COST.overhead_s) - COST.overhead_s
    fitting = bisect_right(range(1, most + 1), bound, key=lambda tokens: cost.seconds(rows + tokens))
    return min(most, max(fitting, LEAST_CHUNK))


def _offers(work: SessionWork, limit: int) -> list[tuple[float, SessionWork, Node]]:
    """Return at most `limit` of a session's nodes, best first, with negated scores so that merging keeps the order.

    No node is so deep that its path and the token after it would exceed what the step may commit.
    """
    plan = work.session.ceilings
    depth = min(plan.depth, work.session.room - 1)
    return [(-score, work, node) for score, node in work.session.tree.best(limit, depth=depth, width=plan.width)]


def _score_of(offer: tuple[float, SessionWork, Node]) -> float:
    return offer[0]
