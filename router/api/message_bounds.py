"""Bounds on a caller's message while it is still bytes.

Protobuf keeps about 60 bytes for each entry of `messages`, which may have come in two, and similar for what a Sampling
lists. So the fields of a message are counted before it is decoded. Packed numbers, at four times their bytes, are not
counted one by one.
"""

from __future__ import annotations

from outrider.errors import InvalidRequest
from outrider.v1 import inference_pb2 as pb

GENERATE = "/outrider.v1.Inference/Generate"
MAX_FIELDS = 16_384  # of a request; 4,096 messages, and all that a Sampling may list
MAX_OTHER_BYTES = 2**16  # of the messages of the other methods, which hold names and numbers

_SAMPLING = pb.GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].number
_MAX_VARINT = 10  # bytes


def check_message(method: str, message: bytes) -> None:
    """Raise InvalidRequest for a message that would take far more memory than it has bytes, or has too many."""
    if method != GENERATE:
        if len(message) > MAX_OTHER_BYTES:
            raise InvalidRequest("message", f"has {len(message)} bytes, must have at most {MAX_OTHER_BYTES}")
    elif more_fields_than(MAX_FIELDS, message):
        raise InvalidRequest(
            "message", f"must have at most {MAX_FIELDS} entries: messages, and what `sampling` lists, together"
        )


def more_fields_than(most: int, request: bytes) -> bool:
    """Whether a GenerateRequest and its Sampling have more than `most` fields.

    Looks at no more than `most` fields, whatever the length. Of bytes that do not parse the fields up to there count.
    """
    fields, parts = 0, [(0, len(request), True)]
    try:
        while parts:
            at, end, outermost = parts.pop()
            while at < end:
                fields += 1
                if fields > most:
                    return True
                tag, at = _varint(request, at)
                match tag & 7:
                    case 0:  # a variable-length number
                        _, at = _varint(request, at)
                    case 1:  # eight bytes
                        at += 8
                    case 2:  # a length and so many bytes
                        size, at = _varint(request, at)
                        if outermost and tag >> 3 == _SAMPLING:
                            parts.append((at, min(at + size, end), False))
                        at += size
                    case 5:  # four bytes
                        at += 4
    except (IndexError, ValueError):
        pass
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length number and the position behind it. Raises IndexError or ValueError."""
    value = 0
    for index in range(_MAX_VARINT):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number of too many bytes")
