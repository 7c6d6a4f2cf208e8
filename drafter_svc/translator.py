"""Drafting for a target with another tokenizer: stands between the upstream and a scheduler that has draft tokens
alone.

To the scheduler it is an upstream whose sessions hold draft tokens; to the upstream it has a mirror in the target's
tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from drafter_svc.scheduler import DraftScheduler
from drafter_svc.sessions.mirror import Mirror
from drafter_svc.translation import Translation
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.proposers.lookup import fits
from outrider.core.session.contract import Contract
from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.committed_window import settled_prefix
from outrider.core.tree.delta import Delta, DigestMismatch, Hints
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import InvalidRequest
from outrider.rpc.liveness import WorkClock

UNBOUNDED = 2**60  # credit that the scheduler gets; nodes sent up keep to the upstream's credit
SENDER = 0  # the scheduler's key in the tree of draft tokens
AT_ONCE = 512  # tokens that are translated on the event loop, or at once in a thread; takes about 20 ms

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class TranslatedSession:
    """A session in both vocabularies."""

    mirror: Mirror  # in the target's tokens
    translation: Translation
    draft_tree: TokenTree  # of the scheduler's nodes
    known: Prefix = NOTHING  # of the draft tokens that never change
    sent: int = 0  # draft tokens that the scheduler has received
    waiting: list[int] = field(default_factory=list)  # to translate; the scheduler has the session once it is empty
    translating: asyncio.Task[None] | None = None  # translates the waiting tokens


class Translator:
    """Wraps a scheduler for a drafter with another tokenizer; `send` receives the nodes in the target's tokens."""

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        *,
        send: Callable[[Attachment, Delta, int, bool], None],
        resync: Callable[[Attachment], None],
    ) -> None:
        self.members: dict[Attachment, TranslatedSession] = {}
        self.nodes = 0  # sent, in the target's tokens
        self._target = target
        self._draft = draft
        self._send = send
        self._resync = resync
        self._scheduler: DraftScheduler

    def serve(self, scheduler: DraftScheduler) -> None:
        """Set the scheduler. Its `send` must be this translator's `on_delta`, and its `resync` `reopen`."""
        self._scheduler = scheduler

    @property
    def progress(self) -> WorkClock:
        """The scheduler's progress."""
        return self._scheduler.progress

    @property
    def level_s(self) -> float:
        """Seconds of the scheduler's levels."""
        return self._scheduler.level_s

    async def run(self) -> None:
        """Drafts until cancelled."""
        try:
            await self._scheduler.run()
        finally:
            for member in self.members.values():
                if member.translating is not None:
                    member.translating.cancel()

    def opened(self, key: Attachment, snapshot: MirrorSnapshot) -> None:
        """Begins or restarts a session. A long text is translated outside the event loop, and drafted for once that is
        done.
        """
        before = self.members.get(key)
        mirror = Mirror(snapshot, first_id=before.mirror.next_id if before else 1)
        if mirror.tree.digest != snapshot.digest:
            self._resync(key)
            return
        if before is not None and before.translating is not None:
            before.translating.cancel()
        member = TranslatedSession(
            mirror, Translation(self._target, self._draft), TokenTree([0]), waiting=list(snapshot.tokens)
        )
        self.members[key] = member
        if len(member.waiting) > AT_ONCE:
            self._scheduler.closed(key)  # its session has another text
            member.translating = asyncio.create_task(self._catch_up(key, member))
            return
        member.translation.extend(member.waiting)
        member.waiting.clear()
        self.reopen(key)

    def updated(self, key: Attachment, update: MirrorUpdate | Hints) -> None:
        """Apply committed tokens or new terms. Hints are ignored: they are tokens of the other vocabulary, and no
        text.
        """
        member = self.members.get(key)
        if member is None or isinstance(update, Hints):
            return
        if not member.mirror.apply_update(update):
            self.closed(key)
            self._resync(key)
            return
        if member.translating is not None:  # bounded by the upstream's context
            member.waiting.extend(update.tokens)
            return
        same, known = member.translation.extend(update.tokens), member.sent
        if same < known:
            self.reopen(key)  # the last draft tokens have changed
            return
        new = member.translation.draft_tokens[known:]
        member.sent += len(new)
        member.draft_tree.commit(new)
        self._scheduler.updated(
            key,
            MirrorUpdate(
                known,
                tuple(new),
                member.draft_tree.digest,
                update.plan,
                update.terms,
                UNBOUNDED,
                (),
            ),
        )

    def closed(self, key: Attachment) -> None:
        """End a session."""
        member = self.members.pop(key, None)
        if member is not None:
            if member.translating is not None:
                member.translating.cancel()
            self._scheduler.closed(key)

    def reopen(self, key: Attachment) -> None:
        """Open the session in the scheduler as it is now."""
        member = self.members.get(key)
        if member is None or not member.translation.draft_tokens or not fits(member.mirror.contract):
            return
        mirror, tokens = member.mirror, member.translation.draft_tokens
        member.known = _settled(member)
        member.draft_tree = TokenTree(tokens, known=member.known)
        member.sent = len(tokens)
        self._scheduler.opened(
            key,
            MirrorSnapshot(
                tuple(tokens),
                member.draft_tree.digest,
                _draft_contract(mirror.contract),
                mirror.plan,
                UNBOUNDED,
                mirror.terms,
                len(tokens),
                known=member.known,
                representative=mirror.representative,
            ),
        )

    async def _catch_up(self, key: Attachment, member: TranslatedSession) -> None:
        """Translate waiting tokens in a thread, a part at a time, so that a cancelled one ends soon."""
        try:
            while member.waiting:
                part = member.waiting[:AT_ONCE]
                del member.waiting[:AT_ONCE]
                await asyncio.to_thread(self._translate, member, part)
        except Exception:  # no caller awaits this task
            log.exception("a text could not be translated; its session gets no drafts")
            self.closed(key)
            return
        member.translating = None
        self.reopen(key)

    def _translate(self, member: TranslatedSession, tokens: Sequence[int]) -> None:
        member.translation.extend(tokens)
        member.known = _settled(member)

    def on_delta(self, key: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """Take the scheduler's new nodes, and send those that add tokens of the target up."""
        member = self.members.get(key)
        if member is None:
            return
        try:
            grafted = member.draft_tree.graft(SENDER, delta)
        except (DigestMismatch, InvalidRequest):
            # The last draft tokens have changed; the scheduler receives them after this pass.
            if exhausted:
                self._send(key, member.mirror.announce(()), plan_version, exhausted)
            return
        added: list[Node] = []
        for node in filter(member.draft_tree.holds, grafted.added):
            added += self._add_path(member, node, member.mirror.room - len(added))
        self.nodes += len(added)
        if added or exhausted:
            self._send(key, member.mirror.announce(added), plan_version, exhausted)

    def _add_path(self, member: TranslatedSession, node: Node, room: int) -> list[Node]:
        """Add the path to a draft node to the tree of the target's tokens. Its new nodes get the draft node's path
        score.
        """
        tree, score = member.mirror.tree, member.draft_tree.score(node)
        at = tree.root
        added: list[Node] = []
        for token in member.translation.propose(member.draft_tree.path(node)):
            child = at.children.get(token)
            if child is None:
                full = len(added) >= room or tree.depth(at) >= member.mirror.plan.depth
                if full or token >= member.mirror.unpadded_vocabulary:
                    break
                ratio = min(1.0, score / tree.score(at))
                child = tree.add(at, token, edge_from_code(edge_code(math.log(max(ratio, 1e-9)))))
                added.append(child)
            at = child
        return added


def _settled(member: TranslatedSession) -> Prefix:
    """Return the digest of the draft tokens that never change, without the last ones."""
    return settled_prefix(member.translation.draft_tokens[: member.translation.settled], member.known)


def _draft_contract(contract: Contract) -> Contract:
    """Return the contract without what names tokens, and under a rule that shares no noise."""
    return Contract(
        seed=contract.seed,
        max_tokens=contract.max_tokens,
        temperature=contract.temperature,
        top_k=contract.top_k,
        top_p=contract.top_p,
        min_p=contract.min_p,
        rule="target-match",
    )
