"""The loop of a drafter without a model: what follows by what followed before, said as soon as a commit is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from drafter_svc.news import News
from drafter_svc.replica import Replica, Snapshot, Update
from drafter_svc.upstream import Attachment
from outrider.core.growth import floor_score
from outrider.core.lookup import Lookup, Lookups, fits, grow
from outrider.core.tree import Delta, Hints, Node
from outrider.rpc.liveness import Progress

CHUNK = 512  # tokens of a prompt that are read before others have their turn; some ten milliseconds


@dataclass(slots=True)
class Member:
    """A session in the loop, and what its upstream said that is not dealt with."""

    news: News = field(default_factory=News)
    replica: Replica | None = None
    lookup: Lookup | None = None
    read: int = 0  # tokens that the lookup has
    answer_position: int = 0


class Finder:
    """Owns the sessions. It is told of them, and tells, as `Grower` is."""

    def __init__(
        self,
        lookups: Lookups,
        *,
        slots: int,
        send: Callable[[Attachment, Delta, int, bool], None],
        resync: Callable[[Attachment], None],
    ) -> None:
        self.members: dict[Attachment, Member] = {}
        self.progress = Progress()
        self.nodes = 0
        self._lookups = lookups
        self._slots = slots
        self._send = send
        self._resync = resync
        self._changed = asyncio.Event()

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        """A session begins, or begins anew. Ignored when there are too many."""
        if key not in self.members and len(self.members) >= self._slots:
            return
        self._note(key, self.members.setdefault(key, Member()).news, snapshot)

    def updated(self, key: Attachment, update: Update | Hints) -> None:
        """A session's upstream committed tokens, changed the terms, or says what it believes."""
        member = self.members.get(key)
        if member is not None:
            self._note(key, member.news, update)

    def closed(self, key: Attachment) -> None:
        """A session is over. Its answer is kept where answers are."""
        member = self.members.pop(key, None)
        if member is not None and member.replica is not None and member.lookup is not None:
            member.lookup.finish(member.replica.tokens[member.answer_position :])

    def _note(self, key: Attachment, news: News, latest: Snapshot | Update | Hints) -> None:
        """What comes while others are read for waits; of more than there can be, all is asked for anew."""
        if news.add(latest):
            self._changed.set()
        else:
            self._resync(key)

    async def run(self) -> None:
        """Answers until cancelled. Nobody with a short text waits for who reads a long one."""
        while True:
            self._changed.clear()
            behind = False
            for key, member in list(self.members.items()):
                if self.members.get(key) is member and (member.news or self._is_behind(member)):
                    self.progress.begin()
                    self._turn(key, member)
                    self.progress.end()
                    if self._is_behind(member):
                        behind = True
                        await asyncio.sleep(0)
            if not behind:
                await self._changed.wait()

    def _is_behind(self, member: Member) -> bool:
        return member.replica is not None and member.replica.wanted and member.read < len(member.replica.tokens)

    def _turn(self, key: Attachment, member: Member) -> None:
        """Hears what is new, reads on, and once all is read says what may follow."""
        if not self._hear(key, member):
            return
        replica, lookup = member.replica, member.lookup
        if replica is None or lookup is None or not replica.plan.depth:
            return
        if replica.wanted:
            part = replica.tokens[member.read : member.read + CHUNK]
            lookup.extend(part)
            member.read += len(part)
        if not self._is_behind(member):
            delta = self._propose(replica, lookup)
            self.nodes += len(delta.tokens)
            self._send(key, delta, replica.plan.version, True)

    def _hear(self, key: Attachment, member: Member) -> bool:
        """False when the copy turned out to be another one than the upstream's: a snapshot is asked for."""
        while member.news:
            news = member.news.popleft()
            if isinstance(news, Snapshot):
                first = member.replica.next_id if member.replica is not None else 1
                member.replica = Replica(news, first_id=first)
                member.lookup, member.read = self._lookups.begin(key.tenant, news.contract), 0
                member.answer_position = news.answer_position
                same = member.replica.tree.digest == news.digest
            elif member.replica is None:
                continue  # from before the snapshot that has been asked for
            elif isinstance(news, Hints):
                member.replica.tree.hint(news)
                same = True
            else:
                same = member.replica.follow(news)
            if not same:
                member.replica = member.lookup = None
                member.news.clear()
                self._resync(key)
                return False
        return True

    def _propose(self, replica: Replica, lookup: Lookup) -> Delta:
        """What is new of what may follow. Nothing for a rule that wants draws."""
        if not replica.wanted or not fits(replica.contract):
            return replica.announce(())
        plan, tree = replica.plan, replica.tree
        best = tree.best_first(depth=plan.depth, width=plan.width)
        hinted = next((node for _, node in best if node.judged and not node.children), None)
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
                    vocabulary=replica.sayable,
                    floor=floor_score(replica.price),
                    room=replica.room - len(added),
                    start=start,
                )
            )
        return replica.announce(added)
