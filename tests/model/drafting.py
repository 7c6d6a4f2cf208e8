"""A drafter: its own copies and trees as they are, with guesses in place of a model, and forged nodes on demand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drafter_svc.sessions.topk_session import TopKSession
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.v1 import drafter_pb2 as pb
from tests.model.language import VOCABULARY, WORDS, choice
from tests.model.routing import Note
from tests.model.wires import Ended, Link

PLAN = Plan(depth=4, width=3, nodes=8)  # what it drafts within, whatever the router's ceilings are
KEPT = 8  # frames that a replay may repeat

Dial = Callable[[str, Callable[[Any], None]], Link]


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A drafter wants to draft for a session."""

    session_id: str
    epoch: int
    attachment: int


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Ends a subscription."""

    attachment: int


@dataclass(frozen=True, slots=True)
class Graft:
    """The new nodes of a drafter's tree."""

    attachment: int
    epoch: int
    delta: Delta


@dataclass(eq=False, slots=True)
class _Attachment:
    session_id: str
    epoch: int
    upstream: str
    number: int = 0
    parts: list[int] = field(default_factory=list)
    draft: TopKSession | None = None


class Drafter:
    """One drafter process, with a stream to each verifier that it drafts for."""

    def __init__(self, name: str, dial: Dial) -> None:
        self.name = name
        self.attachments: dict[str, _Attachment] = {}
        self.sent: list[tuple[str, Graft]] = []  # the latest, each with its upstream
        self._dial = dial
        self._links: dict[str, Link] = {}
        self._numbers: dict[str, int] = {}  # the last of each stream

    def __str__(self) -> str:
        return self.name

    @property
    def drafts(self) -> list[_Attachment]:
        """What it could grow, and may send."""
        return [
            at
            for at in self.attachments.values()
            if at.draft is not None and at.draft.tree.size < PLAN.nodes and at.draft.next_id <= at.draft.credit
        ]

    def heed(self, note: Note) -> None:
        """Attach and Detach."""
        post = note.post
        present = self.attachments.get(post.session_id)
        if note.attach:
            if present is not None:
                if post.epoch <= present.epoch:
                    return
                self._drop(present)
            attachment = _Attachment(post.session_id, post.epoch, post.upstream.worker_id)
            self.attachments[post.session_id] = attachment
            if attachment.upstream in self._links:
                self._subscribe(attachment)
        elif present is not None and present.epoch <= post.epoch:
            self._drop(present)

    def grow(self, random: random.Random) -> None:
        """A few guesses below what one of its trees holds, good and bad."""
        at = random.choice(self.drafts)
        draft = at.draft
        assert draft is not None
        added: list[Node] = []
        for _ in range(min(random.randint(1, 4), draft.credit - draft.next_id + 1)):
            nodes = [draft.tree.root, *(node for _, node in draft.tree.best_first(depth=PLAN.depth - 1, width=9))]
            parent = random.choice(nodes)
            path = reversed([node.token for node in parent.ancestors(draft.tree.root)])
            guess = choice(extend(draft.tree.digest, path))
            token = guess if random.random() < 0.7 else random.choice(WORDS)
            if token not in parent.children:
                added.append(draft.tree.add(parent, token, -random.choice((0.1, 0.5, 2.0))))
        if added:
            self._send(at, Graft(at.number, at.epoch, draft.announce(added)))

    def send_garbage(self, random: random.Random) -> None:
        """Nodes from nowhere: any root, any digest, any parents, any of the sessions."""
        at = random.choice(list(self.attachments.values()))
        draft, count = at.draft, random.randint(1, 3)
        length = len(draft.tokens) if draft is not None else 9
        first = random.choice((0, 1, draft.next_id if draft is not None else 2))
        delta = Delta(
            root_position=max(0, length - 1 - random.choice((0, 0, 1, 3, -1))),
            root_digest=draft.tree.digest if draft is not None and random.random() < 0.5 else random.getrandbits(64),
            first_id=first,
            parents=tuple(random.randint(0, first + index) for index in range(count)),
            tokens=tuple(random.choice(WORDS) for _ in range(count)),
            edges=(0.0,) * count,
        )
        self._send(at, Graft(at.number, at.epoch + random.choice((0, 0, 0, 1)), delta))

    def replay(self, random: random.Random) -> None:
        """An old frame again, on the stream of today."""
        upstream, graft = random.choice(self.sent)
        if upstream in self._links:
            self._links[upstream].forth.put(graft)

    def connect(self) -> None:
        """Streams that broke are there again, for all that is attached."""
        for upstream in {at.upstream: None for at in self.attachments.values() if at.upstream not in self._links}:
            self._connect(upstream)

    @property
    def cut_off(self) -> bool:
        """Whether it has a stream to open again."""
        return any(at.upstream not in self._links for at in self.attachments.values())

    def _receive(self, upstream: str, frame: Any) -> None:
        if isinstance(frame, Ended):
            self._links.pop(upstream, None)
            self._numbers.pop(upstream, None)
            for at in self.attachments.values():
                if at.upstream == upstream:
                    at.draft = None
            return
        kind = frame.WhichOneof("frame")
        message = getattr(frame, kind)
        at = next(
            (at for at in self.attachments.values() if (at.upstream, at.number) == (upstream, message.attachment)), None
        )
        if at is None:
            return
        if kind == "closed":
            del self.attachments[at.session_id]
        elif message.epoch != at.epoch:
            pass
        elif kind == "snapshot":
            self._take_part(at, message)
        elif at.draft is not None and not self._apply(at.draft, message):
            self._subscribe(at)

    def _take_part(self, at: _Attachment, part: pb.Snapshot) -> None:
        if part.position == 0:
            at.parts.clear()
        if part.position != len(at.parts):
            self._subscribe(at)
            return
        at.parts.extend(part.tokens)
        if part.last:
            first = at.draft.next_id if at.draft is not None else 1
            snapshot = MirrorSnapshot(tuple(at.parts), part.digest, _CONTRACT, PLAN, part.credit)
            at.parts.clear()
            at.draft = TopKSession(snapshot, 0, VOCABULARY, first_id=first)
            if at.draft.tree.digest != part.digest:
                self._subscribe(at)

    def _apply(self, draft: TopKSession, commit: pb.Commit) -> bool:
        if commit.position != len(draft.tokens):
            return False
        if commit.tokens:
            draft.commit(commit.tokens)
        draft.credit = commit.credit
        draft.remove_dropped(commit.dropped)
        draft.tree.check_integrity()
        return draft.tree.digest == commit.digest

    def _connect(self, upstream: str) -> None:
        self._links[upstream] = self._dial(upstream, lambda frame: self._receive(upstream, frame))
        for at in self.attachments.values():
            if at.upstream == upstream:
                self._subscribe(at)

    def _subscribe(self, at: _Attachment) -> None:
        at.number = self._numbers[at.upstream] = self._numbers.get(at.upstream, 0) + 1
        at.draft = None
        at.parts.clear()
        self._links[at.upstream].forth.put(Subscribe(at.session_id, at.epoch, at.number))

    def _drop(self, at: _Attachment) -> None:
        del self.attachments[at.session_id]
        if at.upstream in self._links:
            self._links[at.upstream].forth.put(Unsubscribe(at.number))

    def _send(self, at: _Attachment, graft: Graft) -> None:
        if at.upstream in self._links:
            self._links[at.upstream].forth.put(graft)
            self.sent = [*self.sent, (at.upstream, graft)][-KEPT:]


_CONTRACT = Contract(seed=0, max_tokens=99, temperature=0.0)
