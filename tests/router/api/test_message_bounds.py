"""The entries of a message are counted while it is bytes, and no more of them than the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import inference_pb2 as pb
from outrider.wire import message_bounds
from router.api.auth import MAX_FIELDS


def more_fields_than(most: int, request: bytes) -> bool:
    return message_bounds.more_fields_than(pb.GenerateRequest.DESCRIPTOR, most, request)


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.text(max_size=300),
)
def test_messages_and_lists_of_a_sampling_are_counted(
    messages: int, stops: int, biases: int, ids: list[int], text: str
) -> None:
    sampling = pb.Sampling(seed=1, stop=["x"] * stops, logit_bias=dict.fromkeys(range(biases), 1.5), allowed_ids=ids)
    request = pb.GenerateRequest(
        messages=[pb.Message(content=text)] * messages, sampling=sampling, token_ids=pb.TokenIds(ids=ids)
    ).SerializeToString()
    fields = messages + stops + biases + bool(ids) + 3  # and the seed, the sampling and the token ids
    assert not more_fields_than(fields, request)
    assert more_fields_than(fields - 1, request)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_bytes_that_do_not_parse_are_counted_too(garbage: bytes, most: int) -> None:
    assert more_fields_than(most, garbage) in (False, True)


def test_entries_count_across_all_parts_of_a_message() -> None:
    part = pb.GenerateRequest(sampling=pb.Sampling(stop=[""] * 3)).SerializeToString()
    assert more_fields_than(11, part * 3)  # protobuf joins the parts to one Sampling: nine strings, in three fields
    assert not more_fields_than(12, part * 3)


@pytest.mark.parametrize(
    "usual",
    [
        pb.GenerateRequest(messages=[pb.Message(role="user", content="x")] * 4096),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1_000_000))),
        pb.GenerateRequest(
            sampling=pb.Sampling(
                logit_bias=dict.fromkeys(range(4096), 1.0), banned_ids=range(4096), stop_ids=range(4096)
            )
        ),
    ],
    ids=["messages", "token ids", "sampling"],
)
def test_the_largest_legitimate_requests_fit(usual: pb.GenerateRequest) -> None:
    assert not more_fields_than(MAX_FIELDS, usual.SerializeToString())
