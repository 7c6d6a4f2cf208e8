"""What watchers see of a step: rejected nodes only of drafters whose sources are public."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import OFF, StepReport
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1 import types_pb2
from verifier_svc.tracing import step_tree

TEXT = (1, 2, 3)
OPEN, LEARNED = 1, 2  # keys of two drafters
DRAFTERS = {"open": OPEN, "learned": LEARNED}


def drafted(*deltas: tuple[int, tuple[int, ...], tuple[int, ...]]) -> tuple[TokenTree, dict[int, Node]]:
    """A tree with nodes of drafters (sender, parents, tokens), and its nodes by their tokens."""
    tree = TokenTree(TEXT)
    for sender, parents, tokens in deltas:
        tree.graft(sender, Delta(len(TEXT) - 1, extend(EMPTY, TEXT), 1, parents, tokens, (-0.125,) * len(tokens)))
    return tree, {node.token: node for level in tree.levels() for node in level}


def seen(tree: TokenTree, nodes: dict[int, Node], *path: int) -> types_pb2.StepTree:
    """What a watcher sees where the target accepts these tokens."""
    subscriptions = {
        UpstreamStream(name, types_pb2.Heartbeat): SimpleNamespace(sender=key) for name, key in DRAFTERS.items()
    }
    session: Any = SimpleNamespace(
        tree=tree, tokens=list(TEXT), subscriptions=subscriptions, origins={}, terms=SimpleNamespace(plan=OFF)
    )
    accepted = [nodes[token] for token in path]
    choices = [Choice(token, 0.0) for token in (*path, 99)]
    return step_tree(session, {OPEN}, list(nodes.values()), accepted, choices, StepReport())


def test_rejected_nodes_of_private_sources_are_counted_and_hidden() -> None:
    tree, nodes = drafted((OPEN, (0, 1), (10, 11)), (LEARNED, (0, 1, 1), (20, 21, 22)))
    step = seen(tree, nodes, 20)
    assert (list(step.tokens), step.hidden) == ([10, 20, 11], 2)
    assert list(step.parents) == [0, 0, 1]
    assert list(step.accepted) == [1]
    assert [["", "open", "learned"][sender] for sender in step.senders] == ["open", "learned", "open"]
    assert len(step.edges) == 3
    assert list(step.committed) == [20, 99]


def test_a_node_that_a_public_drafter_sent_too_is_shown_unless_its_parent_is_hidden() -> None:
    tree, nodes = drafted((LEARNED, (0, 1), (20, 21)), (OPEN, (0,), (20,)))
    step = seen(tree, nodes)
    assert (list(step.tokens), step.hidden, list(step.accepted)) == ([20], 1, [])
    tree, nodes = drafted((LEARNED, (0, 1), (20, 21)), (OPEN, (0,), (30,)))
    tree.ids.name(nodes[21], OPEN, 9)
    assert list(seen(tree, nodes).tokens) == [30]


def test_nodes_of_a_disconnected_drafter_are_hidden() -> None:
    tree, nodes = drafted((OPEN, (0,), (10,)))
    tree.ids.forget(OPEN)
    assert (list(seen(tree, nodes).tokens), seen(tree, nodes).hidden) == ([], 1)
    assert list(seen(tree, nodes, 10).tokens) == [10]
