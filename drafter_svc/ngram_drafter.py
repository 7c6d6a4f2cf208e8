"""The scheduler of a drafter without a model: it proposes what followed earlier, as soon as a commit is received."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from drafter_svc.sessions.mirror import Inbox, Mirror
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import floor_score
from outrider.core.proposers.lookup import Lookup, Lookups, fits, grow
from outrider.core.sampling.grammar import GrammarState
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.grammar.compiler import GrammarCompiler
from outrider.rpc.liveness import WorkClock

CHUNK = 512  # tokens of a text that are read in one turn; takes about ten milliseconds


@dataclass(slots=True)
class NgramMember:
    """A session in the scheduler, and its upstream's messages that are not applied yet."""

    inbox: Inbox
    mirror: Mirror | None = None
    lookup: Lookup | None = None
    read: int = 0  # tokens that the lookup has read
    answer_position: int = 0
    grammar: GrammarState | None = None  # state of the contract's grammar, as soon as it is compiled
    followed: int = 0  # tokens of the answer that the grammar's state is behind

    def close_grammar(self) -> None:
        """Give up the place in the contract's grammar."""
        if self.grammar is not None:
            self.grammar.close()
        self.grammar = None


class NgramScheduler:
    """Owns the sessions. It has the interface of `DraftScheduler`."""

    def __init__(
        self,
        lookups: Lookups,
        *,
        slots: int,
        send: Callable[[Attachment, Delta, int, bool], None],
        resync: Callable[[Attachment], None],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.members: dict[Attachment, NgramMember] = {}
        self.progress = WorkClock()
        self.level_s = 0.0  # all nodes are sent at once
        self.nodes = 0
        self._lookups = lookups
        self._slots = slots
        self._send = send
        self._resync = resync
        self._grammars = grammars
        self._changed = asyncio.Event()

    def opened(self, key: Attachment, snapshot: MirrorSnapshot) -> None:
        """Begins or restarts a session. Ignored when there are too many."""
        if key not in self.members and len(self.members) >= self._slots:
            return
        if key not in self.members:
            self.members[key] = NgramMember(Inbox(self._changed.set, partial(self._resync, key)))
        self.members[key].inbox.put(snapshot)

    def updated(self, key: Attachment, update: MirrorUpdate | Hints) -> None:
        """Queues a commit, new terms, or hints of a session's upstream."""
        member = self.members.get(key)
        if member is not None:
            member.inbox.put(update)

    def closed(self, key: Attachment) -> None:
        """End a session. Its answer is given to the lookup's store."""
        member = self.members.pop(key, None)
        if member is not None:
            member.close_grammar()
        if member is not None and member.mirror is not None and member.lookup is not None:
            member.lookup.finish(member.mirror.tokens[member.answer_position :])

    async def run(self) -> None:
        """Proposes until cancelled. No session with a short text waits for one that reads a long text."""
        while True:
            self._changed.clear()
            behind = False
            for key, member in list(self.members.items()):
                if self.members.get(key) is member and (member.inbox or self._is_behind(member)):
                    self.progress.begin()
                    self._serve(key, member)
                    self.progress.end()
                    if self._is_behind(member):
                        behind = True
                        await asyncio.sleep(0)
            if not behind:
                await self._changed.wait()

    def _is_behind(self, member: NgramMember) -> bool:
        return member.mirror is not None and member.mirror.worth_drafting and member.read < len(member.mirror.tokens)

    def _serve(self, key: Attachment, member: NgramMember) -> None:
        """Apply messages, read a chunk, and propose once all of the text is read."""
        if not self._apply_inbox(key, member):
            return
        mirror, lookup = member.mirror, member.lookup
        if mirror is None or lookup is None or not mirror.plan.depth:
            return
        if mirror.worth_drafting:
            part = mirror.tokens[member.read : member.read + CHUNK]
            lookup.extend(part)
            member.read += len(part)
        if not self._is_behind(member):
            delta = self._propose(mirror, lookup, self._follow_grammar(key, member, mirror))
            self.nodes += len(delta.tokens)
            self._send(key, delta, mirror.plan.version, True)

    def _apply_inbox(self, key: Attachment, member: NgramMember) -> bool:
        """Apply messages. Return False when the mirror differs from the upstream's copy: a snapshot is requested."""
        while member.inbox:
            message = member.inbox.popleft()
            if isinstance(message, MirrorSnapshot):
                first = member.mirror.next_id if member.mirror is not None else 1
                member.mirror = Mirror(message, first_id=first)
                member.lookup, member.read = self._lookups.begin(key.tenant, message.contract), 0
                member.close_grammar()
                member.answer_position = message.answer_position
                in_step = member.mirror.tree.digest == message.digest
            elif member.mirror is None:
                continue  # sent before the requested snapshot
            elif isinstance(message, Hints):
                member.mirror.tree.hint(message)
                in_step = True
            else:
                in_step = member.mirror.apply_update(message)
            if not in_step:
                member.mirror = member.lookup = None
                member.inbox.clear()
                self._resync(key)
                return False
        return True

    def _follow_grammar(self, key: Attachment, member: NgramMember, mirror: Mirror) -> GrammarState | None:
        """Return the place in the contract's grammar behind the committed tokens; None while it is compiled."""
        grammar = mirror.contract.grammar
        if grammar is None or self._grammars is None:
            return None
        answer = mirror.tokens[member.answer_position :]
        if member.grammar is None:
            member.grammar = self._grammars.known(grammar, answer, key.tenant)
        else:
            member.grammar.extend(answer[member.followed :])
        member.followed = len(answer)
        return member.grammar

    def _propose(self, mirror: Mirror, lookup: Lookup, grammar: GrammarState | None) -> Delta:
        """Return new nodes that may follow; none for a rule that draws nodes from q."""
        if not mirror.worth_drafting or not fits(mirror.contract):
            return mirror.announce(())
        plan, tree = mirror.plan, mirror.tree
        best = tree.best_first(depth=plan.depth, width=plan.width)
        hinted = next((node for _, node in best if node.rescored and not node.children), None)
        added: list[Node] = []
        for start in (tree.root, hinted):
            if start is None:
                break
            added += (
                node
                for node, _ in grow(
                    tree,
                    lookup,
                    nodes=plan.nodes,
                    depth=plan.depth,
                    width=plan.width,
                    vocabulary=mirror.unpadded_vocabulary,
                    floor=floor_score(mirror.terms.min_path_score),
                    room=mirror.room - len(added),
                    start=start,
                    grammar=grammar,
                )
            )
        return mirror.announce(added)
