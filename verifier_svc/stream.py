"""What waits to be sent on one drafter's stream: control frames in order, and one coalesced commit a session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from outrider.core.contract import Contract, Plan
from outrider.core.tree import ALIAS_SPAN
from outrider.rpc.codec import SNAPSHOT_TOKENS, contract_to_pb, plan_to_pb
from outrider.v1 import drafter_pb2 as pb


class DraftStream:
    """The sending side of a Draft call. Bounded: a session's commits coalesce until the drafter reads them."""

    def __init__(self, drafter_id: str) -> None:
        self.drafter_id = drafter_id
        self._control: deque[pb.DraftDown] = deque()
        self._commits: dict[str, pb.Commit] = {}
        self._opening: set[str] = set()  # sessions whose snapshot waits: their commits go after it
        self._wake = asyncio.Event()
        self._ended = False

    def say(self, frame: pb.DraftDown) -> None:
        """Queues a frame that is not a commit."""
        self._control.append(frame)
        self._wake.set()

    def commit(self, commit: pb.Commit) -> bool:
        """Queues a session's commit, joined with one that still waits.

        False when the drafter lags so far that its nodes could not be aliased any more: it needs a snapshot.
        """
        waiting = self._commits.get(commit.session_id)
        if waiting is None or waiting.attachment != commit.attachment:
            self._commits[commit.session_id] = commit
        elif len(waiting.tokens) + len(commit.tokens) > ALIAS_SPAN:
            del self._commits[commit.session_id]
            return False
        else:
            waiting.tokens.extend(commit.tokens)
            waiting.dropped.extend(commit.dropped)
            waiting.digest, waiting.price, waiting.credit = commit.digest, commit.price, commit.credit
            if commit.HasField("plan"):
                waiting.plan.CopyFrom(commit.plan)
        self._wake.set()
        return True

    def snapshot(
        self,
        *,
        session_id: str,
        epoch: int,
        attachment: int,
        tokens: Sequence[int],
        digest: int,
        contract: Contract,
        plan: Plan,
        credit: int,
    ) -> None:
        """Queues all committed tokens, in parts, and forgets the commits that they contain."""
        self._commits.pop(session_id, None)
        self._opening.add(session_id)
        for start in range(0, len(tokens), SNAPSHOT_TOKENS):
            part = pb.Snapshot(
                session_id=session_id,
                epoch=epoch,
                attachment=attachment,
                position=start,
                tokens=tokens[start : start + SNAPSHOT_TOKENS],
            )
            if start + SNAPSHOT_TOKENS >= len(tokens):
                part.last = True
                part.digest = digest
                part.contract.CopyFrom(contract_to_pb(contract))
                part.plan.CopyFrom(plan_to_pb(plan))
                part.credit = credit
            self.say(pb.DraftDown(snapshot=part))

    def close(self, session_id: str, attachment: int, reason: str) -> None:
        """Tells the drafter that a session is over for it."""
        self._commits.pop(session_id, None)
        self.say(pb.DraftDown(closed=pb.Closed(session_id=session_id, attachment=attachment, reason=reason)))

    def end(self) -> None:
        """Nothing more is to be written."""
        self._ended = True
        self._wake.set()

    async def next(self) -> list[pb.DraftDown] | None:
        """The frames to write now, commits first; waits until there is one. None after the end."""
        await self._wake.wait()
        self._wake.clear()
        if self._ended:
            return None
        commits = list(self._commits.values())
        frames = [pb.DraftDown(commit=commit) for commit in commits if commit.session_id not in self._opening]
        frames.extend(self._control)
        frames.extend(pb.DraftDown(commit=commit) for commit in commits if commit.session_id in self._opening)
        self._opening.clear()
        self._commits.clear()
        self._control.clear()
        return frames
