"""Drafting for a target with another tokenizer: stands between the upstream and a loop that knows its own tokens alone.

Towards the loop it is an upstream whose sessions hold own tokens; towards the upstream it has a copy in the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from drafter_svc.grower import Grower
from drafter_svc.replica import Replica, Snapshot, Update
from drafter_svc.translation import Translation
from drafter_svc.upstream import Attachment
from outrider.core.contract import Contract
from outrider.core.digest import EMPTY, extend
from outrider.core.edges import edge_code, edge_from_code
from outrider.core.lookup import fits
from outrider.core.tree import Delta, Hints, Node, TokenTree
from outrider.rpc.liveness import Progress

UNBOUNDED = 2**60  # credit that the loop has; what goes up keeps to the upstream's
SENDER = 0  # the loop, in the tree of own tokens


@dataclass(slots=True)
class Member:
    """A session in both vocabularies."""

    replica: Replica  # in the target's
    translation: Translation
    own: TokenTree  # that the loop has grown
    sent: int = 0  # own tokens that the loop knows of


class Translator:
    """Is told of sessions as a loop is, and has a loop draft for them; `send` gets its nodes in the target's tokens."""

    def __init__(
        self,
        target: Tokenizer,
        own: Tokenizer,
        *,
        send: Callable[[Attachment, Delta, int, bool], None],
        resync: Callable[[Attachment], None],
    ) -> None:
        self._target = target
        self._own = own
        self._send = send
        self._resync = resync
        self._sessions: dict[Attachment, Member] = {}
        self._loop: Grower
        self._nodes = 0

    def serve(self, loop: Grower) -> None:
        """Has `loop` do the drafting. It must have `take` for its `send`, and `reopen` for its `resync`."""
        self._loop = loop

    @property
    def members(self) -> dict[Attachment, Member]:
        """Sessions."""
        return self._sessions

    @property
    def progress(self) -> Progress:
        """The loop's."""
        return self._loop.progress

    @property
    def nodes(self) -> int:
        """Nodes sent, in the target's tokens."""
        return self._nodes

    async def run(self) -> None:
        """Drafts until cancelled."""
        await self._loop.run()

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        """A session begins, or begins anew."""
        before = self._sessions.get(key)
        replica = Replica(snapshot, first_id=before.replica.next_id if before else 1)
        if replica.tree.digest != snapshot.digest:
            self._resync(key)
            return
        translation = Translation(self._target, self._own)
        translation.extend(snapshot.tokens)
        self._sessions[key] = Member(replica, translation, TokenTree(translation.own_tokens or [0]))
        self.reopen(key)

    def updated(self, key: Attachment, update: Update | Hints) -> None:
        """The target said more, or the terms changed. Hints are not taken: they are tokens of the other vocabulary, and
        no text."""
        member = self._sessions.get(key)
        if member is None or isinstance(update, Hints):
            return
        if not member.replica.follow(update):
            self.closed(key)
            self._resync(key)
            return
        known = member.translation.own_tokens[: member.sent]
        member.translation.extend(update.tokens)
        own = member.translation.own_tokens
        if own[: len(known)] != known:
            self.reopen(key)  # the end of the text has become other tokens
            return
        new = own[len(known) :]
        member.sent = len(own)
        member.own.commit(new)
        self._loop.updated(
            key,
            Update(
                len(known),
                tuple(new),
                member.own.digest,
                update.plan,
                update.price,
                update.time_price,
                update.ahead,
                UNBOUNDED,
                (),
            ),
        )

    def closed(self, key: Attachment) -> None:
        """A session is over."""
        if self._sessions.pop(key, None) is not None:
            self._loop.closed(key)

    def reopen(self, key: Attachment) -> None:
        """Tells the loop of the session as it is now."""
        member = self._sessions.get(key)
        if member is None or not member.translation.own_tokens or not fits(member.replica.contract):
            return
        replica, own = member.replica, member.translation.own_tokens
        member.own = TokenTree(own)
        member.sent = len(own)
        self._loop.opened(
            key,
            Snapshot(
                tuple(own),
                extend(EMPTY, own),
                _own_terms(replica.contract),
                replica.plan,
                UNBOUNDED,
                replica.price,
                replica.time_price,
                replica.ahead,
                len(own),
            ),
        )

    def take(self, key: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """The loop's new nodes: those that stand for new tokens of the target go up."""
        member = self._sessions.get(key)
        if member is None:
            return
        before = {id(node) for node in _below(member.own.root)}
        member.own.graft(SENDER, delta)
        added: list[Node] = []
        for node in _below(member.own.root):
            if id(node) not in before:
                added += self._place(member, node, member.replica.room - len(added))
        self._nodes += len(added)
        if added or exhausted:
            self._send(key, member.replica.announce(added), plan_version, exhausted)

    def _place(self, member: Member, node: Node, room: int) -> list[Node]:
        """Adds the path to an own node to the tree of the target's tokens: its new nodes, all of its score."""
        tree, score = member.replica.tree, member.own.score(node)
        at = tree.root
        added: list[Node] = []
        for token in member.translation.propose(member.own.path(node)):
            child = at.children.get(token)
            if child is None:
                if len(added) >= room or tree.depth(at) >= member.replica.plan.depth:
                    break
                ratio = min(1.0, score / tree.score(at))
                child = tree.add(at, token, edge_from_code(edge_code(math.log(max(ratio, 1e-9)))))
                added.append(child)
            at = child
        return added


def _own_terms(contract: Contract) -> Contract:
    """A contract over other tokens: what names tokens is left out, and the noise is nobody's to share."""
    return Contract(
        seed=contract.seed,
        max_tokens=contract.max_tokens,
        temperature=contract.temperature,
        top_k=contract.top_k,
        top_p=contract.top_p,
        min_p=contract.min_p,
        rule="target-match",
    )


def _below(root: Node) -> list[Node]:
    """All nodes below, parents before children."""
    found = list(root.children.values())
    for node in found:
        found.extend(node.children.values())
    return found
