"""Drafting for a target with another tokenizer: stands between the upstream and a loop that knows its own tokens alone.

Towards the loop it is an upstream whose sessions hold own tokens; towards the upstream it has a copy in the target's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from drafter_svc.grower import Grower
from drafter_svc.replica import Replica, Snapshot, Update
from drafter_svc.translation import Translation
from drafter_svc.upstream import Attachment
from outrider.core.contract import Contract
from outrider.core.digest import NOTHING, Prefix
from outrider.core.edges import edge_code, edge_from_code
from outrider.core.lookup import fits
from outrider.core.tree import Delta, Drifted, Hints, Node, TokenTree, settled
from outrider.errors import InvalidRequest
from outrider.rpc.liveness import Progress

UNBOUNDED = 2**60  # credit that the loop has; what goes up keeps to the upstream's
SENDER = 0  # the loop, in the tree of own tokens
AT_ONCE = 512  # tokens that are translated on the event loop, or at a time beside it: some 20 ms

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Member:
    """A session in both vocabularies."""

    replica: Replica  # in the target's
    translation: Translation
    own: TokenTree  # that the loop has grown
    known: Prefix = NOTHING  # of the own tokens that stay as they are
    sent: int = 0  # own tokens that the loop knows of
    waiting: list[int] = field(default_factory=list)  # tokens to translate; while there are any, the loop knows nothing
    work: asyncio.Task[None] | None = None  # that translates them


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
        try:
            await self._loop.run()
        finally:
            for member in self._sessions.values():
                if member.work is not None:
                    member.work.cancel()

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        """A session begins, or begins anew. A long text is translated beside the event loop, and drafted for once that
        is done."""
        before = self._sessions.get(key)
        replica = Replica(snapshot, first_id=before.replica.next_id if before else 1)
        if replica.tree.digest != snapshot.digest:
            self._resync(key)
            return
        if before is not None and before.work is not None:
            before.work.cancel()
        member = Member(replica, Translation(self._target, self._own), TokenTree([0]), waiting=list(snapshot.tokens))
        self._sessions[key] = member
        if len(member.waiting) > AT_ONCE:
            self._loop.closed(key)  # what it has is another text's
            member.work = asyncio.create_task(self._catch_up(key, member))
            return
        member.translation.extend(member.waiting)
        member.waiting.clear()
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
        if member.work is not None:  # what is said meanwhile is bounded by the upstream's context
            member.waiting.extend(update.tokens)
            return
        same, known = member.translation.extend(update.tokens), member.sent
        if same < known:
            self.reopen(key)  # the end of the text has become other tokens
            return
        new = member.translation.own_tokens[known:]
        member.sent += len(new)
        member.own.commit(new)
        self._loop.updated(
            key,
            Update(
                known,
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
        member = self._sessions.pop(key, None)
        if member is not None:
            if member.work is not None:
                member.work.cancel()
            self._loop.closed(key)

    def reopen(self, key: Attachment) -> None:
        """Tells the loop of the session as it is now."""
        member = self._sessions.get(key)
        if member is None or not member.translation.own_tokens or not fits(member.replica.contract):
            return
        replica, own = member.replica, member.translation.own_tokens
        member.known = _settled(member)
        member.own = TokenTree(own, known=member.known)
        member.sent = len(own)
        self._loop.opened(
            key,
            Snapshot(
                tuple(own),
                member.own.digest,
                _own_terms(replica.contract),
                replica.plan,
                UNBOUNDED,
                replica.price,
                replica.time_price,
                replica.ahead,
                len(own),
                known=member.known,
            ),
        )

    async def _catch_up(self, key: Attachment, member: Member) -> None:
        """Translates what waits, a part at a time in a thread, so that one that is not wanted any more ends soon."""
        try:
            while member.waiting:
                part = member.waiting[:AT_ONCE]
                del member.waiting[:AT_ONCE]
                await asyncio.to_thread(self._translate, member, part)
        except Exception:  # nobody waits for this task
            log.exception("a text could not be translated; its session gets no drafts")
            self.closed(key)
            return
        member.work = None
        self.reopen(key)

    def _translate(self, member: Member, tokens: Sequence[int]) -> None:
        member.translation.extend(tokens)
        member.known = _settled(member)

    def take(self, key: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """The loop's new nodes: those that stand for new tokens of the target go up."""
        member = self._sessions.get(key)
        if member is None:
            return
        before = {id(node) for node in _below(member.own.root)}
        try:
            member.own.graft(SENDER, delta)
        except (Drifted, InvalidRequest):
            # The end of the text has become other tokens, which the loop takes up after this pass.
            if exhausted:
                self._send(key, member.replica.announce(()), plan_version, exhausted)
            return
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
                full = len(added) >= room or tree.depth(at) >= member.replica.plan.depth
                if full or token >= member.replica.sayable:
                    break
                ratio = min(1.0, score / tree.score(at))
                child = tree.add(at, token, edge_from_code(edge_code(math.log(max(ratio, 1e-9)))))
                added.append(child)
            at = child
        return added


def _settled(member: Member) -> Prefix:
    """The digest of the own tokens that stay as they are, but for the last ones."""
    return settled(member.translation.own_tokens[: member.translation.settled], member.known)


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
