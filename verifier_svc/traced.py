"""What a trace tells of one session's steps: a span for each, linked to the spans of the drafts that it verified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from outrider.core.tree import Delta, Node, TokenTree
from outrider.telemetry.tracing import Attributes, began, wall_ns

if TYPE_CHECKING:
    from verifier_svc.step import Step, Work


class TracedSteps:
    """Tells of steps below the span of their Decode call, once the next pass runs."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._drafts: dict[tuple[int, int], bytes] = {}  # in which span a node was drafted, by its (sender, id)
        self._drafted = 0  # nodes that came since the last step
        self._unused = 0  # of these, those that were late, beyond the tree's room, or known

    def grafted(self, sender: int, delta: Delta, added: Sequence[Node]) -> None:
        """A delta has come, of which these nodes were new."""
        self._drafted += len(delta.tokens)
        self._unused += len(delta.tokens) - len(added)
        if delta.span:
            first = delta.first_id
            self._drafts |= dict.fromkeys(((sender, first + at) for at in range(len(delta.tokens))), delta.span)

    def before(self, work: Work) -> Pending:
        """What a step that is about to commit knows of the session."""
        names = {name for node in work.nodes for name in node.names}
        drafts = {self._drafts[name] for name in names if name in self._drafts}
        return Pending(work, sorted(drafts), work.session.tree.size)

    def after(self, step: Step, pending: Pending, committed: int, accepted: int) -> None:
        """It has committed so many tokens, of which so many were drafted."""
        work, session, tree = pending.work, pending.work.session, pending.work.session.tree
        held, verified, plan = pending.held, len(work.nodes), session.plan
        drafted, unused, self._drafted, self._unused = self._drafted, self._unused, 0, 0
        self._drafts = {name: span for name, span in self._drafts.items() if _lives(tree, name)}
        self._later(
            "verify",
            step,
            {
                "outrider.position": len(session.tokens),
                "outrider.tokens.committed": committed,
                "outrider.nodes.drafted": drafted,
                "outrider.nodes.unused": unused,
                "outrider.nodes.held": held,
                "outrider.nodes.verified": verified,
                "outrider.nodes.accepted": accepted,
                "outrider.nodes.rejected": verified - accepted,
                "outrider.nodes.left_out": held - verified,
                "outrider.nodes.pruned": max(0, held - verified - tree.size),
                "outrider.nodes.kept": tree.size,
                "outrider.price": step.price,
                "outrider.plan.version": plan.version,
                "outrider.plan.depth": plan.depth,
                "outrider.plan.width": plan.width,
                "outrider.plan.nodes": plan.nodes,
                "outrider.way": session.way.value,
                "outrider.drafters": len(session.subscriptions),
            },
            pending.drafts,
        )

    def read(self, step: Step, work: Work) -> None:
        """A step has read a chunk of the prompt."""
        self._later("read", step, {"outrider.position": work.end, "outrider.tokens.read": work.end - work.start}, ())

    def _later(self, name: str, step: Step, attributes: Attributes, drafts: Sequence[bytes]) -> None:
        asyncio.get_running_loop().call_soon(self._tell, name, step, attributes, drafts, time.monotonic())

    def _tell(self, name: str, step: Step, attributes: Attributes, drafts: Sequence[bytes], now: float) -> None:
        shared: Attributes = {
            "outrider.step.rows": step.tokens,
            "outrider.step.sessions": len(step.works),
            "outrider.step.waited": step.waited,
            "outrider.step.forward": step.seconds,
        }
        span = began(name, self._span, step.began - step.waited, {**attributes, **shared}, drafts)
        span.end(wall_ns(now))


class Pending:
    """What a step knew of a session before it committed."""

    __slots__ = ("drafts", "held", "work")

    def __init__(self, work: Work, drafts: Sequence[bytes], held: int) -> None:
        self.work = work
        self.drafts = drafts  # spans of the drafts that it verified
        self.held = held  # nodes of the tree


def _lives(tree: TokenTree, name: tuple[int, int]) -> bool:
    return tree.node(*name) is not None
