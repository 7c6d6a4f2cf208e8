"""What traces and watchers show of a session's steps: spans, linked to those of the drafts that each step verified, and
the trees that were verified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Set
from typing import NamedTuple

from opentelemetry.trace import Span

from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import StepReport
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code
from outrider.core.tree.token_tree import TokenTree
from outrider.telemetry.tracing import Attributes, start_span, wall_ns
from outrider.upstream.upstream_session import UpstreamSession
from outrider.wire import types as wire
from outrider.wire.types import plan_to_pb, report_to_pb


class StepFigures(NamedTuple):
    """What the spans of all sessions have in common."""

    began: float  # when the pass began, by time.monotonic
    seconds: float  # duration of the pass
    waited: float  # seconds for which the step was held back on purpose
    rows: int
    sessions: int
    min_path_score: float  # path score below which a node was not worth verifying


class PendingStep(NamedTuple):
    """What the span of a step needs of a session from before its commit."""

    drafts: Sequence[bytes]  # spans of the drafts that the step verifies
    held: int  # nodes in the tree
    verified: int  # nodes that the step verifies


class TracedSteps:
    """Makes a span for each step below the span of the session's Decode call, while the next pass runs."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._drafts: dict[tuple[int, int], bytes] = {}  # the span that a node was drafted in, by its (sender, id)
        self._drafted = 0  # nodes that were received since the last step
        self._unused = 0  # of these, those that were late, did not fit the tree, or were known

    def on_delta(self, sender: int, delta: Delta, added: Sequence[Node]) -> None:
        """Count a delta's nodes, of which `added` were new, and remember the delta's span."""
        self._drafted += len(delta.tokens)
        self._unused += len(delta.tokens) - len(added)
        if delta.span:
            first = delta.first_id
            self._drafts |= dict.fromkeys(((sender, first + at) for at in range(len(delta.tokens))), delta.span)

    def before_commit(self, tree: TokenTree, nodes: Sequence[Node]) -> PendingStep:
        """Return what the span of a step needs to know of the tree and its verified nodes before the step commits."""
        names = {name for node in nodes for name in node.names}
        drafts = {self._drafts[name] for name in names if name in self._drafts}
        return PendingStep(sorted(drafts), tree.size, len(nodes))

    def after_commit(
        self,
        session: UpstreamSession,
        control: Attributes,
        step: StepFigures,
        pending: PendingStep,
        committed: int,
        accepted: int,
    ) -> None:
        """Make the span of a step that committed `tokens` tokens, of which `accepted` were drafted. `control`: see
        `Steering.attributes`."""
        held, verified, plan, tree = pending.held, pending.verified, session.terms.plan, session.tree
        drafted, unused, self._drafted, self._unused = self._drafted, self._unused, 0, 0
        self._drafts = {name: span for name, span in self._drafts.items() if _lives(tree, name)}
        self._schedule_span(
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
                "outrider.min_path_score": step.min_path_score,
                "outrider.plan.version": plan.version,
                "outrider.plan.depth": plan.depth,
                "outrider.plan.width": plan.width,
                "outrider.plan.nodes": plan.nodes,
                "outrider.drafters": len(session.subscriptions),
                **control,
            },
            pending.drafts,
        )

    def on_prefill(self, step: StepFigures, start: int, end: int) -> None:
        """Make the span of a step that read tokens [start, end) of the prompt."""
        self._schedule_span("read", step, {"outrider.position": end, "outrider.tokens.read": end - start}, ())

    def _schedule_span(self, name: str, step: StepFigures, attributes: Attributes, drafts: Sequence[bytes]) -> None:
        asyncio.get_running_loop().call_soon(self._make_span, name, step, attributes, drafts, time.monotonic())

    def _make_span(
        self, name: str, step: StepFigures, attributes: Attributes, drafts: Sequence[bytes], now: float
    ) -> None:
        shared: Attributes = {
            "outrider.step.rows": step.rows,
            "outrider.step.sessions": step.sessions,
            "outrider.step.waited": step.waited,
            "outrider.step.forward": step.seconds,
        }
        span = start_span(name, self._span, step.began - step.waited, {**attributes, **shared}, drafts)
        span.end(wall_ns(now))


def _lives(tree: TokenTree, name: tuple[int, int]) -> bool:
    return tree.ids.node(*name) is not None


def step_tree(
    session: UpstreamSession,
    public: Set[int],
    nodes: Sequence[Node],
    path: Sequence[Node],
    choices: Sequence[Choice],
    report: StepReport,
) -> wire.StepTree:
    """Return what a watcher sees of a step that verified `nodes` (parents before children) and accepts `path`, before
    the tree is re-rooted.

    A node that was not accepted may be a piece of another tenant's text that its drafter has learned. It is shown only
    if a drafter sent it whose sources are `public` (keys of drafters); the others are counted.
    """
    drafters = {it.sender: stream.drafter_id for stream, it in session.subscriptions.items()}
    drafters |= {sender: name for name, sender in session.origins.items()}
    numbers = {sender: number for number, sender in enumerate(drafters, 1)}
    origins, accepted = session.tree.ids.origins, set(path)
    rows: dict[Node | None, int] = {}  # of the shown nodes, counted from 1; 0 is the root
    for node in nodes:
        beside = node.parent is session.tree.root or node.parent in rows
        if beside and (node in accepted or not public.isdisjoint(origins(node))):
            rows[node] = len(rows) + 1
    shown = [node for node in nodes if node in rows]
    return wire.StepTree(
        position=len(session.tokens),
        committed=[choice.token for choice in choices],
        tokens=[node.token for node in shown],
        parents=[rows.get(node.parent, 0) for node in shown],
        edges=bytes(edge_code(node.edge) for node in shown),
        accepted=[at for at, node in enumerate(shown) if node in accepted],
        drafters=drafters.values(),
        senders=[min((numbers.get(sender, 0) for sender in origins(node)), default=0) for node in shown],
        left_out=session.tree.size - len(nodes),
        hidden=len(nodes) - len(shown),
        report=report_to_pb(report),
        plan=plan_to_pb(session.terms.plan),
    )
