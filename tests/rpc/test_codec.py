"""Every value survives the wire, and everything malformed is refused with the field's name."""

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.contract import Contract, Overlap, Plan, StepReport
from outrider.core.edges import edge_from_code
from outrider.core.tree import Delta
from outrider.errors import InvalidRequest
from outrider.rpc import codec
from outrider.v1 import drafter_pb2 as pb

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
    overlap=st.sampled_from(Overlap),
)
reports = st.builds(
    StepReport,
    st.integers(0, 2**32 - 1),
    *[st.integers(0, codec.MAX_DELTA_NODES)] * 2,
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


@given(contracts, plans, reports)
def test_contracts_plans_and_reports_round_trip(contract: Contract, plan: Plan, report: StepReport) -> None:
    assert codec.contract_from_pb(codec.contract_to_pb(contract)) == contract
    assert codec.plan_from_pb(codec.plan_to_pb(plan)) == plan
    assert codec.report_from_pb(codec.report_to_pb(report)) == report


@given(deltas())
def test_deltas_round_trip_through_bytes(delta: Delta) -> None:
    message = codec.delta_to_pb(delta, attachment=2, epoch=1, plan_version=3)
    assert codec.delta_from_pb(pb.TreeDelta.FromString(message.SerializeToString()), 4096) == delta


def test_a_node_costs_about_four_bytes() -> None:
    def size(count: int) -> int:
        parents = tuple(max(0, identity - 3) for identity in range(1, count + 1))
        delta = Delta(5, 6, 1, parents, (3000,) * count, (-0.5,) * count)
        return codec.delta_to_pb(delta, attachment=2, epoch=1, plan_version=3).ByteSize()

    assert (size(100) - size(20)) / 80 <= 4.1


def good() -> dict[str, Any]:
    return {"attachment": 1, "first_id": 4, "parents": [0, 1], "tokens": [7, 8], "edges": b"\x01\x02"}


def test_the_well_formed_delta_of_the_next_test_is_accepted() -> None:
    assert codec.delta_from_pb(pb.TreeDelta(**good()), 10).parents == (0, 4)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": [1] * 1025, "parents": [0] * 1025, "edges": b"\0" * 1025}, "tokens"),
        ({"tokens": [7, 10]}, "tokens"),
        ({"parents": [0]}, "parents"),
        ({"edges": b"\x01"}, "parents"),
        ({"parents": [4, 0]}, "parents"),
        ({"first_id": 0, "parents": [0, 0]}, "first_id"),
    ],
)
def test_a_malformed_delta_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        codec.delta_from_pb(pb.TreeDelta(**(good() | change)), 10)
    assert refusal.value.field == field


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_decoded_and_never_crash(data: bytes) -> None:
    message = pb.DraftUp()
    with suppress(DecodeError):  # gRPC answers it
        message.ParseFromString(data)
        with suppress(InvalidRequest):
            delta = codec.delta_from_pb(message.delta, 4096)
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
    message = codec.contract_to_pb(Contract(seed=1, max_tokens=2))
    for name, value in change.items():
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequest) as refusal:
        codec.contract_from_pb(message)
    assert refusal.value.field == field


def test_an_absurd_plan_is_refused_by_its_field() -> None:
    message = codec.plan_to_pb(Plan())
    message.depth = 65
    with pytest.raises(InvalidRequest, match=r"plan\.depth"):
        codec.plan_from_pb(message)
