"""Bounds on a caller's message while it is still bytes. Those between parts are in `outrider.wire.message_bounds`."""

from __future__ import annotations

from outrider.errors import InvalidRequest
from outrider.v1 import inference_pb2 as pb
from outrider.wire.message_bounds import more_fields_than

GENERATE = "/outrider.v1.Inference/Generate"
MAX_FIELDS = 16_384  # of a request; 4,096 messages, and all that a Sampling may list
MAX_OTHER_BYTES = 2**16  # of the messages of the other methods, which hold names and numbers


def check_message(method: str, message: bytes) -> None:
    """Raise InvalidRequest for a message that would take far more memory than it has bytes, or has too many."""
    if method != GENERATE:
        if len(message) > MAX_OTHER_BYTES:
            raise InvalidRequest("message", f"has {len(message)} bytes, must have at most {MAX_OTHER_BYTES}")
    elif more_fields_than(pb.GenerateRequest.DESCRIPTOR, MAX_FIELDS, message):
        raise InvalidRequest(
            "message", f"must have at most {MAX_FIELDS} entries: messages, and what `sampling` lists, together"
        )
