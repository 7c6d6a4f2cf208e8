"""The pass that a device has begun while the host still works on the one before.

It reads the tokens where the pass before has written them, on the device. So all that the host knows of it is sent
while that one runs, and two replays begin it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.logprobs import ScoredTokens
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Choice
from outrider.engine.following import FollowingPass
from outrider.engine.gpu.passes.packing import OUTPUTS, packed
from outrider.engine.gpu.passes.pass_runner import PassRunner
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.token_choice import VERIFIED
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import BestTokens, Logits

_UNKNOWN = np.zeros(1, np.int64)  # a token that is not chosen yet


@dataclass(frozen=True, slots=True)
class NextRows:
    """The rows that may follow a pass of one row for each text."""

    sources: list[int]  # their texts' segments in the pass before
    segments: list[Segment]  # segments without their tokens, which are not known yet
    draws: list[Draw]

    @classmethod
    def of(
        cls, segments: Sequence[Segment], draws: Sequence[Draw | None], following: FollowingPass, rows: int
    ) -> NextRows | None:
        """Return the rows behind a pass, None if no text goes on or a choice needs what the host does not know yet.

        `rows`: of a slot.
        """
        found = cls([], [], [])
        for source, (it, draw, stop_ids) in enumerate(zip(segments, draws, following.stop_ids, strict=True)):
            if draw is None or len(it.tokens) != 1 or not it.outputs or it.span != 1:
                return None
            if draw.restriction is not None and draw.restriction.history is not None:
                return None  # penalties follow the tokens
            if stop_ids is None or it.prefix + 2 > rows:
                continue
            found.sources.append(source)
            found.segments.append(replace(it, prefix=it.prefix + 1, tokens=_UNKNOWN, positions=it.positions + 1))
            found.draws.append(draw)
        return found if found.segments else None

    def all_end(self, tokens: Sequence[int], following: FollowingPass) -> bool:
        """Return whether all texts end with these tokens."""
        ends = (following.stop_ids[source] or () for source in self.sources)
        return all(token in stop_ids for token, stop_ids in zip(tokens, ends, strict=True))


@dataclass(slots=True)
class BegunPass:
    """A pass that was started ahead."""

    rows: dict[int, tuple[int, Segment, Draw]]  # by slot, of texts that have gone on since: row, segment, draw
    logits: DeviceLogits

    @classmethod
    def of(cls, following: NextRows, tokens: Sequence[int], logits: DeviceLogits) -> BegunPass:
        """`tokens`: one token for each row."""
        rows = {}
        for row, (it, draw, token) in enumerate(zip(following.segments, following.draws, tokens, strict=True)):
            rows[it.slot] = row, replace(it, tokens=np.array([token])), draw
        return cls(rows, logits)

    def logits_of(self, segments: Sequence[Segment], draws: Sequence[Draw | None]) -> PickedLogits | None:
        """Return the logits of these segments, None if the pass does not have all of them."""
        picked = []
        for it, draw in zip(segments, draws, strict=True):
            row, mine, drawn = self.rows.get(it.slot, (0, None, None))
            if mine is None or draw is None or drawn is None or not (_is_same(it, mine) and _is_same_draw(draw, drawn)):
                return None
            picked.append(row)
        return PickedLogits(self.logits, np.array(picked))


class PickedLogits:
    """Some rows of a pass; see `Logits`."""

    def __init__(self, source: DeviceLogits, rows: NDArray[np.int64]) -> None:
        """`rows`: of `source`."""
        self.source = source
        self.rows = rows
        self.vocabulary = source.vocabulary

    def row(self, index: int) -> NDArray[np.float32]:
        return self.source.row(int(self.rows[index]))

    def choice(self, index: int) -> Choice | None:
        return self.source.choice(int(self.rows[index]))

    def best(self, index: int) -> BestTokens | None:
        return self.source.best(int(self.rows[index]))

    def score(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
        return self.source.score(self.rows[[*rows]].tolist(), tokens, alternatives)


class NextPass:
    """Begins the pass that follows a call, and keeps it until it is wanted or a slot of it changes."""

    def __init__(self, passes: PassRunner) -> None:
        self._passes = passes
        self.begun: BegunPass | None = None  # behind the last call

    def take(self, segments: Sequence[Segment], draws: Sequence[Draw | None]) -> PickedLogits | None:
        """Return the logits of these rows, if the last call has begun them."""
        begun, self.begun = self.begun, None
        return None if begun is None else begun.logits_of(segments, draws)

    def forget(self, slot: int) -> None:
        """Have a row that was begun computed anew, because its slot changes."""
        if self.begun is not None:
            self.begun.rows.pop(slot, None)

    def begin(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], following: FollowingPass, logits: PickedLogits
    ) -> frozenset[int]:
        """Read the logits of a call, and begin the pass that follows it, if there is one and it is wanted then.

        Return the slots of the pass that was begun.
        """
        found = NextRows.of(segments, draws, following, self._passes.kv.rows)
        launch = None if found is None else self._prepare(found, logits)
        logits.source.fetch()
        if found is None or launch is None:
            return frozenset()
        tokens = chosen_tokens(logits, found)
        if tokens is None or found.all_end(tokens, following) or not following.wanted():
            return frozenset()
        self.begun = BegunPass.of(found, tokens, launch())
        return frozenset(self.begun.rows)

    def _prepare(self, rows: NextRows, before: PickedLogits) -> Callable[[], DeviceLogits] | None:
        """Upload the next pass's inputs. Return a function that starts it, or None if it cannot be pipelined.

        Its tokens are taken over on the device, where this pass writes them.
        """
        passes, kv, vocabulary = self._passes, self._passes.kv, before.vocabulary
        choices, count = before.source.only_choices, len(rows.segments)
        if choices is None or count > OUTPUTS[-1] or (kv.bounded and kv.table.free < 2 * count):
            return None
        with passes.runtime.computing():
            result = DeviceLogits(vocabulary, [1] * count)
            (parts,) = packed(rows.segments)
            prepared = passes.prepare(parts, rows.draws, VERIFIED, result.first)
            if len(prepared.runs) > 1:
                return None
            (run,), (head,) = prepared.runs, prepared.heads
            assert head is not None
            for it in rows.segments:
                kv.table.prepare(it.slot, it.prefix, it.prefix + 1)
            kv.move(kv.table.take_moves())  # whether the pass begins or not
            passes.send(prepared.layers, rows.segments, run)
            chosen = passes.choice.send(run, VERIFIED)
            tokens = passes.inputs.rows(prepared.layers.plan).tokens
            sources = passes.runtime.sent(before.rows[rows.sources])
            tokens[:count] = choices[sources, 0].long().clamp(0, vocabulary - 1)

        def launch() -> DeviceLogits:
            with passes.runtime.computing():
                prepared.layers.replay()
                passes.choice.compute(head, run, chosen, result, last=False)
            return result

        return launch


def chosen_tokens(logits: Logits, following: NextRows) -> list[int] | None:
    """Return the tokens of the rows that follow a pass with these logits; None if the host has to choose one."""
    choices = [logits.choice(source) for source in following.sources]
    tokens = [it.token for it in choices if it is not None]
    return tokens if len(tokens) == len(choices) else None


def _is_same(one: Segment, other: Segment) -> bool:
    """Return whether two segments have the same single row."""
    return (
        len(one.tokens) == 1
        and one.mask is None
        and one.outputs == 1
        and (one.prefix, one.tokens[0], one.positions[0]) == (other.prefix, other.tokens[0], other.positions[0])
        and one.adapter is other.adapter
    )


def _is_same_draw(one: Draw, other: Draw) -> bool:
    return one[:2] == other[:2] and one.restriction is other.restriction
