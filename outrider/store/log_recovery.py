"""What an owner restores when Redis lost part of its session: decided here, written by one script.

Redis may come back without its last writes. The owner, which holds all tokens in memory, reads what Redis holds and
continues only if that is an earlier state of its own session; the script writes the missing entries unless the session
was written since that read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, InternalError, Superseded
from outrider.store.records import SessionRecord, pack, stride

_ENTRY_TOKENS = 4096


def restored_record(
    seen: SessionRecord | None, record: SessionRecord, epoch: int, owner: str, tokens: Sequence[int]
) -> SessionRecord:
    """Return the record to write, for an owner under `epoch` whose session is `record` with `tokens`.

    `seen` is the record in Redis, None if there is none. Raises Superseded when another owner has the session by rights
    or it is closed, Conflict when Redis holds no earlier state of this session.
    """
    if record.turn is None or len(tokens) < record.turn.answer_position:
        raise InternalError("only a session with a generation and all tokens of its prompt can be restored")
    if seen is not None:
        _check_owner(seen, epoch, owner)
        _check_text(seen, record, tokens)
    return replace(record, epoch=epoch + 1, owner=owner, length=len(tokens), digest=extend(EMPTY, tokens), closed=False)


def missing_entries(
    present: int, record: SessionRecord, tokens: Sequence[int], logprobs: bytes
) -> Iterator[int | bytes]:
    """Yield the log's missing entries behind its first `present` tokens: for each its position, tokens and
    log-probabilities.

    `logprobs` are the response's. The prompt and the response never share an entry.
    """
    assert record.turn is not None
    answer = record.turn.answer_position
    bytes_per_token = stride(len(tokens) - answer, logprobs)
    position = present
    while position < len(tokens):
        stop = min(position + _ENTRY_TOKENS, answer if position < answer else len(tokens))
        yield position
        yield pack(tokens[position:stop])
        yield (
            logprobs[(position - answer) * bytes_per_token : (stop - answer) * bytes_per_token]
            if position >= answer
            else b""
        )
        position = stop


def _check_owner(seen: SessionRecord, epoch: int, owner: str) -> None:
    if seen.closed:
        raise Superseded(f"session {seen.session_id} was closed; do not retry")
    # epoch + 1 is ours if an earlier try lost its reply. An older epoch is one that we took over from, or one given out
    # anew after Redis lost ours; then the text decides which owner continues.
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
    raise Conflict(f"session {seen.session_id}: another writer changed it after Redis lost data; {problem}")
