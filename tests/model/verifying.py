"""A verifier: its own sessions, trees and drafters' streams as they are, with the network and the model left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import Plan, StepReport
from outrider.core.session.decoding import DecodeStart, ReceivedCommit
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta, DigestMismatch
from outrider.core.tree.node import Node
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.errors import OutriderError
from outrider.upstream.upstream_session import Subscription, UpstreamStream
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from router.sessions.verifier_client import DecodeEnd, DecodeIdle
from tests.model.drafting import Graft, Subscribe, Unsubscribe
from tests.model.language import VOCABULARY
from tests.model.redis import Violation
from tests.model.routing import Durable, Started
from tests.model.wires import Ended, Link
from verifier_svc.session import SessionStart as Opening
from verifier_svc.session import VerifierSession

PART = 5  # tokens of a snapshot's part
ROOM = 2  # frames that are written ahead to a drafter that does not read

Choose = Callable[[int], int]  # digest of all tokens before -> the target's token


class Verifier:
    """One verifier process. A step takes its nodes when it begins, and commits when it ends."""

    def __init__(self, name: str, choose: Choose) -> None:
        self.name = name
        self.sessions: dict[str, VerifierSession] = {}
        self.passing: list[tuple[VerifierSession, list[Node]]] = []  # what the step that runs does
        self._choose = choose
        self._routers: dict[VerifierSession, Link] = {}
        self._streams: dict[Link, UpstreamStream] = {}
        self._links: dict[UpstreamStream, Link] = {}
        self._waiting: dict[tuple[UpstreamStream, int], Subscribe] = {}

    def __str__(self) -> str:
        return f"{self.name} {[(name, session.epoch, len(session.tokens)) for name, session in self.sessions.items()]}"

    @property
    def ready(self) -> bool:
        """Whether a step would do something."""
        return not self.passing and any(session.ready for session in self.sessions.values())

    def begin_step(self) -> None:
        """Takes every session that is ready, with the best of its tree."""
        for session in self.sessions.values():
            if session.ready:
                plan = session.ceilings
                best = session.tree.best_first(depth=min(plan.depth, session.room - 1), width=plan.width)
                self.passing.append((session, [node for _, node in itertools.islice(best, plan.nodes)]))

    def end_step(self) -> None:
        """Commits the target's own tokens as far as the nodes hold them, and one more."""
        passing, self.passing = self.passing, []
        for session, nodes in passing:
            if not session.finished:
                self._commit(session, nodes)
        self._pump()

    def receive_from_router(self, link: Link, message: Any) -> None:
        """One message of a Decode call."""
        if isinstance(message, DecodeStart):
            self._open(link, message)
        else:
            session = next((session for session, at in self._routers.items() if at is link), None)
            match message:
                case _ if session is None:
                    pass
                case Durable(position):
                    if position > len(session.tokens):
                        raise Violation(f"{position} tokens are durable, of {len(session.tokens)} committed")
                    session.commits.acknowledge(position)
                case Plan():
                    session.terms.plan = message if message.version > session.terms.plan.version else session.terms.plan
                case Ended():
                    self._close(session)
        self._pump()

    def receive_from_drafter(self, link: Link, frame: Any) -> None:
        """One frame of a Draft stream; the first one opens it."""
        if isinstance(frame, Ended):
            stream = self._streams.pop(link, None)
            if stream is not None:
                del self._links[stream]
                for key in [key for key in self._waiting if key[0] is stream]:
                    del self._waiting[key]
                for subscription in list(stream.subscriptions.values()):
                    subscription.session.unsubscribe(stream)
            return
        if link not in self._streams:
            stream = self._streams[link] = UpstreamStream(link.name.partition(" ")[0], types_pb2.Heartbeat)
            self._links[stream] = link
            link.back.moved = self._pump
        stream = self._streams[link]
        match frame:
            case Subscribe():
                if frame.attachment > stream.attached:
                    stream.attached = frame.attachment
                    self._subscribe(stream, frame)
            case Unsubscribe(attachment):
                self._waiting.pop((stream, attachment), None)
                if attachment in stream.subscriptions:
                    stream.subscriptions[attachment].session.unsubscribe(stream)
            case Graft():
                self._graft(stream, frame)
        self._pump()

    def give_up(self, session: VerifierSession) -> None:
        """The router has sent nothing for the time of a lease."""
        self._routers[session].end(Ended("Unavailable", "the router has been silent"))
        self._close(session)
        self._pump()

    def expire_waiting(self) -> None:
        """Subscriptions that waited too long for their session are closed."""
        for stream, attachment in list(self._waiting):
            del self._waiting[stream, attachment]
            stream.close(attachment, "unknown session")
        self._pump()

    def beat(self) -> None:
        """Sends a sign of machine on every call."""
        for link in self._routers.values():
            link.back.put(DecodeIdle())

    def _open(self, link: Link, start: DecodeStart) -> None:
        answered = len(start.tokens) - start.answer_position
        if answered >= start.contract.max_tokens or (answered and start.tokens[-1] in start.contract.stop_ids):
            raise Violation(f"a start of {answered} tokens of an answer that has ended")
        present = self.sessions.get(start.session_id)
        if present is not None:
            if self._refuses(start, present):
                link.end(Ended("Superseded", f"owned under epoch {present.epoch}"))
                return
            if start.epoch <= present.epoch:
                raise Violation(f"session {present.id} went from epoch {present.epoch} to {start.epoch}")
            present.commits.fenced = True
            self._routers[present].end(Ended("Superseded", "taken over under a higher epoch"))
            self._close(present)
        if extend(EMPTY, start.tokens) != start.digest:
            raise Violation(f"a digest does not fit the {len(start.tokens)} tokens of a start")
        opening = Opening(
            start.session_id,
            start.tenant,
            start.epoch,
            start.tokens,
            start.answer_position,
            start.contract,
            start.plan,
            start.window,
        )
        session = VerifierSession(opening, AcquiredSlot(0, 0, None), VOCABULARY, ArrivalPatterns())
        self.sessions[session.id] = session
        self._routers[session] = link
        link.back.put(Started())
        for (stream, attachment), subscribe in list(self._waiting.items()):
            if subscribe.session_id == session.id:
                del self._waiting[stream, attachment]
                self._subscribe(stream, subscribe)

    def _refuses(self, start: DecodeStart, present: VerifierSession) -> bool:
        return start.epoch <= present.epoch

    def _close(self, session: VerifierSession) -> None:
        del self._routers[session]
        session.finished = True
        if self.sessions.get(session.id) is session:
            del self.sessions[session.id]
        for stream, subscription in list(session.subscriptions.items()):
            session.unsubscribe(stream)
            stream.close(subscription.attachment, "fenced" if session.commits.fenced else "finished")

    def _commit(self, session: VerifierSession, nodes: list[Node]) -> None:
        taken, root = set(nodes), session.tree.root
        digest, node, choices = session.tree.digest, root, list[Choice]()
        while True:
            token = self._next(digest, node)
            choices.append(Choice(token, 1.0))
            digest = extend(digest, (token,))
            child = node.children.get(token)
            if token in session.contract.stop_ids or child is None or child not in taken:
                break
            node = child
        report = StepReport(verified=len(nodes), drafters=len(session.subscriptions))
        commit = session.commit(choices, report, 0.0)
        session.commits.get_nowait()
        session.tree.check_integrity()
        tokens = tuple(choice.token for choice in choices)
        if commit.digest != digest:
            raise Violation("a tree's digest is not that of its tokens")
        link = self._routers[session]
        gaps = (1.0,) * len(tokens)
        link.back.put(ReceivedCommit(session.epoch, commit.position, tokens, gaps, b"", digest, report))
        if commit.last:
            link.back.put(DecodeEnd())
        for subscription in session.subscriptions.values():
            self._send_commit(subscription, pb.Commit(position=commit.position, tokens=tokens))

    def _next(self, digest: int, node: Node) -> int:
        """The target's token after what the digest stands for, where the tree is at `node`."""
        return self._choose(digest)

    def _subscribe(self, stream: UpstreamStream, subscribe: Subscribe) -> None:
        session = self.sessions.get(subscribe.session_id)
        if session is None:
            self._waiting[stream, subscribe.attachment] = subscribe
        elif self._admits(subscribe, session):
            self._snapshot(session.subscribe(stream, subscribe.attachment, Calibration()))
        else:
            stream.close(subscribe.attachment, "fenced")

    def _admits(self, subscribe: Subscribe, session: VerifierSession) -> bool:
        return subscribe.epoch == session.epoch

    def _graft(self, stream: UpstreamStream, graft: Graft) -> None:
        subscription = stream.subscriptions.get(graft.attachment)
        if subscription is None or subscription.session.epoch != graft.epoch:
            return
        session = subscription.session
        try:
            dropped = self._take(subscription, graft.delta)
        except DigestMismatch:
            self._snapshot(subscription)
            return
        except OutriderError as error:
            session.unsubscribe(stream)
            stream.close(graft.attachment, f"malformed: {error}")
            return
        session.tree.check_integrity()
        for other, ids in dropped.items():
            self._send_commit(other, pb.Commit(position=len(session.tokens), dropped=ids))

    def _take(self, subscription: Subscription, delta: Delta) -> dict[Subscription, list[int]]:
        return subscription.session.graft(subscription, delta, 0.0, passing=bool(self.passing))

    def _send_commit(self, subscription: Subscription, commit: pb.Commit) -> None:
        session = subscription.session
        commit.attachment, commit.epoch = subscription.attachment, session.epoch
        commit.digest, commit.credit = session.tree.digest, session.grant(subscription)
        if not subscription.stream.commit(commit):
            self._snapshot(subscription)

    def _snapshot(self, subscription: Subscription) -> None:
        subscription.stream.snapshot(subscription.attachment, partial(_parts, subscription))

    def _pump(self) -> None:
        """Writes what waits, most urgent first, as far as the drafters read."""
        for link, stream in list(self._streams.items()):
            while link.back.open and len(link.back.items) < ROOM and (frame := stream.next_now()) is not None:
                link.back.put(frame)


def _parts(subscription: Subscription) -> Iterator[pb.Snapshot]:
    session = subscription.session
    tokens, digest = tuple(session.tokens), session.tree.digest
    for start in range(0, len(tokens), PART):
        last = start + PART >= len(tokens)
        part = pb.Snapshot(
            attachment=subscription.attachment,
            epoch=session.epoch,
            position=start,
            tokens=tokens[start : start + PART],
            last=last,
        )
        if last:
            part.digest = digest
            part.credit = session.grant(subscription)
        yield part
