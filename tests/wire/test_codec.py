"""Every value survives the wire, and everything malformed is refused with the field's name."""

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.acceptance import SparseRow
from outrider.core.session.contract import Contract, Plan, PlanOverlap, StepReport
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.score_codec import edge_from_code
from outrider.errors import InvalidRequest
from outrider.telemetry.tracing import SPAN_BYTES
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire import drafter, types

contracts = st.builds(
    Contract,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 2**31),
    choice=st.integers(0, 2**32 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=5),
    allowed_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    banned_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    min_tokens=st.integers(0, 1),
    stop_ids=st.lists(st.integers(0, 2**32 - 1), max_size=64),
    logprobs=st.none() | st.integers(0, 20),
)
plans = st.builds(
    Plan,
    version=st.integers(0, 2**64 - 1),
    depth=st.integers(0, 64),
    width=st.integers(0, 64),
    nodes=st.integers(0, 1024),
    wait_us=st.integers(0, 10_000_000),
    overlap=st.sampled_from(PlanOverlap),
)
reports = st.builds(
    StepReport,
    st.integers(0, 2**32 - 1),
    *[st.integers(0, types.MAX_DELTA_NODES)] * 2,
    *[st.integers(0, 2**32 - 1)] * 5,
)


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    first = draw(st.integers(1, 2**60))
    count = draw(st.integers(1, 30))
    parents = tuple(
        draw(st.one_of(st.just(0), st.integers(max(1, identity - 200), identity - 1))) if identity > 1 else 0
        for identity in range(first, first + count)
    )
    return Delta(
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 2**64 - 1)),
        first,
        parents,
        tuple(draw(st.lists(st.integers(0, 4095), min_size=count, max_size=count))),
        tuple(map(edge_from_code, draw(st.binary(min_size=count, max_size=count)))),
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Contract, types_pb2.Contract), (Plan, types_pb2.Plan), (StepReport, types_pb2.StepReport)],
    ids=lambda kind: kind.__name__,
)
def test_a_value_has_the_fields_of_its_message(kind: Any, message: Any) -> None:
    assert set(types.field_names(kind)) == {field.name for field in message.DESCRIPTOR.fields}


@given(contracts, plans, reports)
def test_contracts_plans_and_reports_round_trip(contract: Contract, plan: Plan, report: StepReport) -> None:
    assert types.contract_from_pb(types.contract_to_pb(contract)) == contract
    assert types.plan_from_pb(types.plan_to_pb(plan)) == plan
    assert types.report_from_pb(types.report_to_pb(report)) == report


@given(deltas())
def test_deltas_round_trip_through_bytes(delta: Delta) -> None:
    message = drafter.delta_to_pb(delta, attachment=2, epoch=1, plan_version=3)
    assert drafter.delta_from_pb(pb.TreeDelta.FromString(message.SerializeToString()), 4096) == delta


def test_a_node_costs_about_four_bytes() -> None:
    def size(count: int) -> int:
        parents = tuple(max(0, identity - 3) for identity in range(1, count + 1))
        delta = Delta(5, 6, 1, parents, (3000,) * count, (-0.5,) * count)
        return drafter.delta_to_pb(delta, attachment=2, epoch=1, plan_version=3).ByteSize()

    assert (size(100) - size(20)) / 80 <= 4.1


FULL = Delta(
    5,
    6,
    4,
    (0, 4),
    (7, 8),
    (-1 / 16, -0.5),
    drawn=(SparseRow((3, 8), (1, 65535)),),
    origin="d2",
    rescored=((2, -0.25), (3, -2.0)),
    version=9,
    span=b"s" * SPAN_BYTES,
)


def test_a_deltas_message_has_every_field_and_its_attachment() -> None:
    message = drafter.delta_to_pb(FULL, attachment=2, epoch=1, plan_version=3, exhausted=True)
    assert message == pb.TreeDelta(
        attachment=2,
        epoch=1,
        root_position=5,
        root_digest=6,
        first_id=4,
        parents=[0, 1],
        tokens=[7, 8],
        edges=b"\x01\x08",
        drawn=[pb.DrawnFrom(tokens=[3, 8], weights=[1, 65535])],
        plan_version=3,
        exhausted=True,
        origin="d2",
        rescored=[2, 3],
        rescored_edges=b"\x04\x20",
        rescore_version=9,
        span=b"s" * SPAN_BYTES,
    )
    assert drafter.delta_from_pb(message, 9) == FULL
    assert not drafter.delta_to_pb(FULL, attachment=2, epoch=1, plan_version=3).exhausted


def good() -> dict[str, Any]:
    return {"attachment": 1, "first_id": 4, "parents": [0, 1], "tokens": [7, 8], "edges": b"\x01\x02"}


def many(count: int) -> dict[str, Any]:
    return {"tokens": [1] * count, "parents": [0] * count, "edges": b"\0" * count}


ROW = {"tokens": [7, 9], "weights": [1, 65535]}


def drawn(**change: Any) -> dict[str, Any]:
    return {"drawn": [pb.DrawnFrom(**ROW | change)]}


@pytest.mark.parametrize(
    "change",
    [
        {},
        many(1024),
        {"first_id": 1, "parents": [0, 1]},
        {"parents": [3, 4]},  # down to the first id of all
        {"drawn": [pb.DrawnFrom(**ROW)] * 2},
        drawn(tokens=[0], weights=[65535]),
        {"rescored": [1] * 1024, "rescored_edges": b"\0" * 1024},
        {"origin": "x" * 64},
        {"span": b"x" * SPAN_BYTES},
    ],
)
def test_a_delta_just_within_the_bounds_is_accepted(change: dict[str, Any]) -> None:
    message = pb.TreeDelta(**(good() | change))
    delta = drafter.delta_from_pb(message, 10)
    assert drafter.delta_to_pb(delta, attachment=1, epoch=0, plan_version=0) == message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (many(1025), "tokens: a delta has 1025 nodes, must have at most 1024"),
        ({"tokens": [7, 10]}, "tokens: token id 10 is outside the vocabulary (0 to 9)"),
        ({"parents": [0]}, "parents: 1 parents and 2 edges for 2 tokens"),
        ({"edges": b"\x01"}, "parents: 2 parents and 1 edges for 2 tokens"),
        ({"parents": [4, 0]}, "parents: node 4 names a parent 4 ids before it"),
        ({"first_id": 0, "parents": [0, 0]}, "first_id: must be at least 1: id 0 is the root"),
        ({"drawn": [pb.DrawnFrom(**ROW)] * 3}, "drawn: has 3 rows for 2 nodes"),
        ({"rescored": [1]}, "rescored: 1 ids, 0 edges; at most 1024"),
        (
            {"rescored": [1] * 1025, "rescored_edges": b"\0" * 1025},
            "rescored: 1025 ids, 1025 edges; at most 1024",
        ),
        ({"origin": "x" * 65}, "origin: has 65 characters, must have at most 64"),
        ({"span": b"x"}, f"span: has 1 bytes, must have none or {SPAN_BYTES}"),
        (drawn(tokens=[7, 10]), "drawn: token id 10 is outside the vocabulary (0 to 9)"),
        (drawn(tokens=[7, 7]), "drawn: a row must have 1 to 512 tokens, ascending, and a weight for each"),
        (drawn(tokens=[], weights=[]), "drawn: a row must have 1 to 512 tokens, ascending, and a weight for each"),
        (drawn(weights=[1]), "drawn: a row must have 1 to 512 tokens, ascending, and a weight for each"),
        (drawn(weights=[0, 9]), "drawn: a weight must be 1 to 65535"),
        (drawn(weights=[1, 65536]), "drawn: a weight must be 1 to 65535"),
    ],
)
def test_a_malformed_delta_is_refused_with_the_reason(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        drafter.delta_from_pb(pb.TreeDelta(**(good() | change)), 10)
    assert str(refusal.value) == problem
    assert refusal.value.field == problem.partition(":")[0]


def test_a_drawn_row_has_at_most_512_tokens() -> None:
    def row(count: int) -> pb.TreeDelta:
        return pb.TreeDelta(**good() | {"drawn": [pb.DrawnFrom(tokens=range(count), weights=[1] * count)]})

    assert drafter.delta_from_pb(row(512), 1000).drawn == (SparseRow((*range(512),), (1,) * 512),)
    with pytest.raises(InvalidRequest, match="512"):
        drafter.delta_from_pb(row(513), 1000)


HINTS = Hints(5, (-1, 0, 1, -1), (7, 8, 9, 0), (-1 / 16, -0.5, -0.25, -2.0))


def test_hints_survive_the_wire_and_name_their_attachment() -> None:
    message = drafter.hints_to_pb(HINTS, attachment=2, epoch=1)
    assert message == pb.Hints(
        attachment=2, epoch=1, root_position=5, parents=[0, 1, 1, 0], tokens=[7, 8, 9, 0], edges=b"\x01\x08\x04\x20"
    )
    assert drafter.hints_from_pb(message, 10) == HINTS


def test_hints_may_have_as_many_nodes_as_a_delta() -> None:
    assert len(drafter.hints_from_pb(pb.Hints(**many(1024)), 10).tokens) == 1024


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (pb.Hints(**many(1025)), "tokens: 1025 hints, must be at most 1024"),
        (pb.Hints(**many(2) | {"parents": [0]}), "parents: 1, and 2 edges, for 2 tokens"),
        (pb.Hints(**many(2) | {"edges": b"\0"}), "parents: 2, and 1 edges, for 2 tokens"),
        (pb.Hints(**many(2) | {"parents": [0, 2]}), "parents: one lies before the first hint"),
        (pb.Hints(**many(2) | {"tokens": [1, 10]}), "tokens: token id 10 is outside the vocabulary (0 to 9)"),
    ],
)
def test_malformed_hints_are_refused_with_the_reason(message: pb.Hints, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        drafter.hints_from_pb(message, 10)
    assert str(refusal.value) == problem


def test_features_are_rows_of_finite_little_endian_bfloat16() -> None:
    rows = drafter.features_from_pb(b"\x01\x00\x02\x01\x7f\x7f\x80\x3f", 2)  # 0x7F7F is the largest finite one
    assert rows.tolist() == [[0x0001, 0x0102], [0x7F7F, 0x3F80]]
    assert drafter.features_from_pb(b"", 2).shape == (0, 2)
    assert drafter.features_from_pb(b"", 0).size == 0
    assert drafter.features_from_pb(b"\x80\x3f" * 3, 1).shape == (3, 1)


@pytest.mark.parametrize(
    ("data", "width", "problem"),
    [
        (b"\0\0", 0, "features: were not asked for"),
        (b"\0" * 6, 2, "features: 6 bytes are no rows of 2 numbers of two bytes"),
        (b"\0", 1, "features: 1 bytes are no rows of 1 numbers of two bytes"),
        (b"\0\0\x80\x7f", 2, "features: must be finite"),  # infinity
        (b"\0\0\x80\xff", 2, "features: must be finite"),
        (b"\xc0\x7f", 1, "features: must be finite"),  # not a number
    ],
)
def test_malformed_features_are_refused_with_the_reason(data: bytes, width: int, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        drafter.features_from_pb(data, width)
    assert str(refusal.value) == problem


@pytest.mark.parametrize(
    ("width", "tokens"),
    [(0, 4096), (1, 4096), (128, 4096), (129, 4064), (256, 2048), (2**18, 2), (2**19, 1), (2**20, 1)],
)
def test_a_part_of_a_snapshot_has_a_mebibyte_of_features_and_at_least_a_token(width: int, tokens: int) -> None:
    assert drafter.tokens_in_part(width) == tokens


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_decoded_and_never_crash(data: bytes) -> None:
    message = pb.DraftUp()
    with suppress(DecodeError):  # gRPC answers it
        message.ParseFromString(data)
        with suppress(InvalidRequest):
            delta = drafter.delta_from_pb(message.delta, 4096)
            assert len(delta.tokens) == len(delta.parents) == len(delta.edges)
            assert all(token < 4096 for token in delta.tokens)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"rule": "typical"}, "rule"),
        ({"stop_ids": [1] * 65}, "stop_ids"),
        ({"banned_ids": [1] * 4097}, "banned_ids"),
        ({"allowed_ids": [1] * 4097}, "allowed_ids"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(4097), 0.5)}, "logit_bias"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": -101.0}, "frequency_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_an_absurd_contract_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    message = types.contract_to_pb(Contract(seed=1, max_tokens=2))
    for name, value in change.items():
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequest) as refusal:
        types.contract_from_pb(message)
    assert refusal.value.field == field


def test_an_absurd_plan_is_refused_by_its_field() -> None:
    message = types.plan_to_pb(Plan())
    message.depth = 65
    with pytest.raises(InvalidRequest, match=r"plan\.depth"):
        types.plan_from_pb(message)


@pytest.mark.parametrize("field", ["accepted", "verified_depth"])
def test_a_report_of_a_step_deeper_than_a_tree_can_be_is_refused(field: str) -> None:
    assert getattr(types.report_from_pb(types_pb2.StepReport(**{field: 1024})), field) == 1024
    with pytest.raises(InvalidRequest, match=r"^report: accepts \d+ nodes, at most 1024 can be$"):
        types.report_from_pb(types_pb2.StepReport(**{field: 1025}))
