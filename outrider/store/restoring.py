"""What an owner puts back when Redis lost part of its session: decided here, written by one script.

Redis may come back without the last moments of its life. The owner, who holds all tokens in memory, looks at what is
there, and goes on only if that is an earlier state of its own session; the script writes what is missing if nobody
wrote since that look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.core.digest import EMPTY, extend
from outrider.errors import Conflict, InternalError, Superseded
from outrider.store.records import SessionRecord, pack, stride

_PIECE = 4096  # tokens of one log entry


def restored(
    seen: SessionRecord | None, record: SessionRecord, epoch: int, owner: str, tokens: Sequence[int]
) -> SessionRecord:
    """The record to write, for an owner under `epoch` whose session is `record` with `tokens`.

    `seen` is what Redis holds, None: nothing. Raises Superseded when somebody else owns the session by rights or it
    is closed, Conflict when what Redis holds is no earlier state of ours.
    """
    if record.turn is None or len(tokens) < record.turn.answer_position:
        raise InternalError("only a session with a generation and all tokens of its prompt can be restored")
    if seen is not None:
        _check_owner(seen, epoch, owner)
        _check_text(seen, record, tokens)
    return replace(record, epoch=epoch + 1, owner=owner, length=len(tokens), digest=extend(EMPTY, tokens), closed=False)


def pieces(present: int, record: SessionRecord, tokens: Sequence[int], logprobs: bytes) -> Iterator[int | bytes]:
    """The log's missing entries, behind its first `present` tokens: for each its position, tokens, log-probabilities.

    `logprobs` are the answer's. The prompt and the answer never share an entry.
    """
    assert record.turn is not None
    answer = record.turn.answer_position
    each = stride(len(tokens) - answer, logprobs)
    position = present
    while position < len(tokens):
        stop = min(position + _PIECE, answer if position < answer else len(tokens))
        yield position
        yield pack(tokens[position:stop])
        yield logprobs[(position - answer) * each : (stop - answer) * each] if position >= answer else b""
        position = stop


def _check_owner(seen: SessionRecord, epoch: int, owner: str) -> None:
    if seen.closed:
        raise Superseded(f"session {seen.session_id} was closed; do not retry")
    # epoch + 1 is ours where an earlier try lost its reply. An older epoch is one that we took over from, or one
    # given out anew after Redis lost ours: whose text goes on is then decided by the text.
    if seen.epoch > epoch + 1 or (seen.epoch >= epoch and seen.owner != owner):
        raise Superseded(f"session {seen.session_id} belongs to {seen.owner} since epoch {seen.epoch}; do not retry")


def _check_text(seen: SessionRecord, record: SessionRecord, tokens: Sequence[int]) -> None:
    same_turn = seen.generation == record.generation and seen.turn == record.turn
    if seen.generation > record.generation or (seen.generation == record.generation and not same_turn):
        problem = f"its generation {seen.generation} is not ours"
    elif same_turn and seen.finished and (seen.finished, seen.length) != (record.finished, len(tokens)):
        problem = f"its generation has ended ({seen.finished}) with {seen.length} durable tokens"
    elif seen.length > len(tokens):
        problem = f"it has {seen.length} durable tokens, more than our {len(tokens)}"
    elif seen.digest != extend(EMPTY, tokens[: seen.length]):
        problem = f"its {seen.length} durable tokens differ from ours"
    else:
        return
    raise Conflict(f"session {seen.session_id}: somebody else wrote after Redis lost what we had; {problem}")
