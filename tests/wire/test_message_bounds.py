"""Fields of a message between parts are counted while it is bytes; what parts send fits."""

from __future__ import annotations

import gc
import time

import pytest
from google.protobuf.message import Message

from outrider.core.acceptance.draft_distribution import MAX_TOKENS
from outrider.errors import InvalidRequest
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.drafter import PART_BYTES, SNAPSHOT_TOKENS
from outrider.wire.message_bounds import (
    LONG,
    MAX_FIELDS,
    MAX_TOGETHER,
    REQUEST,
    UNCOUNTED_BYTES,
    MessageBound,
    decode,
    more_fields_than,
)
from outrider.wire.types import MAX_DELTA_NODES

ID, LARGE = 150_000, 2**40
PLAN = types_pb2.Plan(version=LARGE, depth=8, width=4, nodes=64, wait_us=1000, overlap=types_pb2.OVERLAP_NEVER)
REPORT = types_pb2.StepReport(verified=16, accepted=3, forward_us=20_000, wire_bytes=5000, elapsed_us=9, ranks=b"xyz")
DELTA = pb.TreeDelta(
    attachment=ID,
    epoch=3,
    root_position=5000,
    root_digest=LARGE,
    first_id=ID,
    parents=[1] * 16,
    tokens=[ID] * 16,
    edges=bytes(16),
    plan_version=3,
    exhausted=True,
    drawn=[pb.DrawnFrom(tokens=range(8), weights=[ID] * 8)] * 4,
    origin="drafter-00c0ffee",
    rescored=range(ID, ID + 16),
    rescored_edges=bytes(16),
    rescore_version=9,
    span=bytes(8),
)
LARGEST_DELTA = pb.TreeDelta(
    attachment=ID,
    parents=[1] * MAX_DELTA_NODES,
    tokens=[ID] * MAX_DELTA_NODES,
    edges=bytes(MAX_DELTA_NODES),
    drawn=[pb.DrawnFrom(tokens=[ID] * MAX_TOKENS, weights=[65535] * MAX_TOKENS)] * MAX_DELTA_NODES,
)
COMMIT = pb.Commit(
    attachment=ID, position=9, tokens=[ID] * 256, plan=PLAN, min_path_score=0.5, credit=9, dropped=range(50)
)
CONTRACT = types_pb2.Contract(
    seed=LARGE,
    logit_bias=dict.fromkeys(range(4096), 1.5),
    allowed_ids=range(ID, ID + 4096),
    banned_ids=range(ID, ID + 4096),
    grammar=types_pb2.Grammar(kind="regex", text="x" * 131_072),
)
DECODED = verifier_pb2.DecodeCommit(
    handle=9,
    tokens=[ID] * 4,
    gaps=[0.5] * 4,
    report=REPORT,
    logprobs=bytes(400),
    contributions=[verifier_pb2.DrafterContribution(drafter_id="drafter-00c0ffee", verified=9)] * 16,
)
SENT: dict[str, tuple[MessageBound, Message]] = {
    "deltas": (REQUEST, pb.DraftUp(deltas=[DELTA] * MAX_TOGETHER)),
    "the largest delta behind a mebibyte": (REQUEST, pb.DraftUp(deltas=[*[DELTA] * 850, LARGEST_DELTA])),
    "commits": (LONG, pb.DraftDown(commits=[COMMIT] * MAX_TOGETHER)),
    "a snapshot": (
        LONG,
        pb.DraftDown(
            snapshot=pb.Snapshot(
                tokens=[ID] * SNAPSHOT_TOKENS, last=True, contract=CONTRACT, plan=PLAN, features=bytes(PART_BYTES)
            )
        ),
    ),
    "a start": (
        LONG,
        verifier_pb2.DecodeRequest(
            start=verifier_pb2.DecodeStart(tokens=[ID] * 2**20, contract=CONTRACT, plan=PLAN, trace={"a": "b"})
        ),
    ),
    "plans of all generations": (
        LONG,
        verifier_pb2.DecodeRequest(
            plans=[verifier_pb2.PlanChange(handle=ID, plan=PLAN)] * 1024,
            acknowledged=range(1024),
            durable=range(LARGE, LARGE + 1024),
        ),
    ),
    "commits of generations": (
        LONG,
        verifier_pb2.DecodeResponse(
            commits=[DECODED] * MAX_TOGETHER,
            started=[verifier_pb2.DecodeStarted(handle=ID)] * 1024,
            ended=[verifier_pb2.DecodeEnded(handle=ID, error=types_pb2.Error(details="x" * 1024))] * 1024,
        ),
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_the_largest_message_of_each_kind_fits_its_bound(name: str) -> None:
    bound, message = SENT[name]
    assert decode(type(message), bound, message.SerializeToString()) == message


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (pb.DraftUp, "deltas"),
        (pb.DraftUp, "delta.drawn"),
        (pb.DraftDown, "commits"),
        (pb.DraftDown, "snapshot.contract.logit_bias"),
        (verifier_pb2.DecodeRequest, "plans"),
        (verifier_pb2.DecodeRequest, "start.trace"),
        (verifier_pb2.DecodeResponse, "commits"),
        (verifier_pb2.DecodeResponse, "started"),
        (verifier_pb2.DecodeResponse, "ended"),
        (verifier_pb2.WarmRequest, "tokens"),
    ],
)
def test_empty_messages_count_at_every_depth(kind: type[Message], path: str) -> None:
    *outer, last = path.split(".")
    descriptor, tags = kind.DESCRIPTOR, []
    for name in outer:
        tags.append(descriptor.fields_by_name[name].number)
        descriptor = descriptor.fields_by_name[name].message_type
    data = bytes([descriptor.fields_by_name[last].number << 3 | 2, 0]) * 100
    for tag in reversed(tags):
        data = bytes([tag << 3 | 2, 0x80 | len(data) & 0x7F, len(data) >> 7]) + data
    assert more_fields_than(kind.DESCRIPTOR, 99 + len(outer), data)
    assert not more_fields_than(kind.DESCRIPTOR, 100 + len(outer), data)


def test_messages_that_replace_each_other_count_each() -> None:
    ended = verifier_pb2.DecodeResponse(ended=[verifier_pb2.DecodeEnded(reason=types_pb2.FINISH_REASON_STOP)])
    in_turn = bytes([2 << 3, 1, 3 << 3 | 2, 0]) * 25  # a reason, an error
    data = bytes([8 << 3 | 2, len(in_turn)]) + in_turn
    assert len(verifier_pb2.DecodeResponse.FromString(data).ended) == len(ended.ended)
    assert more_fields_than(verifier_pb2.DecodeResponse.DESCRIPTOR, 50, data)
    assert not more_fields_than(verifier_pb2.DecodeResponse.DESCRIPTOR, 51, data)


def test_a_message_beyond_the_fields_is_refused_within_a_moment() -> None:
    data = bytes([6 << 3 | 2, 0]) * (REQUEST.size // 2)
    gc.collect()
    gc.freeze()  # as a server does: a process of tests holds far more
    try:
        began = time.thread_time()
        with pytest.raises(InvalidRequest, match=f"at most {MAX_FIELDS} fields"):
            decode(pb.DraftUp, REQUEST, data)
        took = time.thread_time() - began
    finally:
        gc.unfreeze()
    assert took < 0.5  # to parse it takes more than a second


def test_a_short_message_is_not_counted() -> None:
    data = bytes([6 << 3 | 2, 0]) * (UNCOUNTED_BYTES // 2)
    assert len(decode(pb.DraftUp, MessageBound(LONG.size, 1), data).deltas) == UNCOUNTED_BYTES // 2
