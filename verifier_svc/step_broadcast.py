"""What a session's watchers see of a step: the tree as it was verified, and the accepted nodes."""

from __future__ import annotations

from collections.abc import Sequence, Set

from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import StepReport
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code
from outrider.upstream_server.upstream_session import UpstreamSession
from outrider.v1 import types_pb2
from outrider.wire.codec import plan_to_pb, report_to_pb


def step_tree(
    session: UpstreamSession,
    public: Set[int],
    nodes: Sequence[Node],
    path: Sequence[Node],
    choices: Sequence[Choice],
    report: StepReport,
) -> types_pb2.StepTree:
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
    return types_pb2.StepTree(
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
