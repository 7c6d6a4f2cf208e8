"""Bounds on a peer's message while it is still bytes.

Protobuf keeps 40 to 170 bytes for a nested message or a listed string, which may have come in two. So the fields of a
long message are counted before it is decoded. Packed numbers, at up to 14 times their bytes, are not counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.errors import InvalidRequest
from outrider.v1 import drafter_pb2, verifier_pb2

REQUEST_BYTES = 6 * 2**20  # of a peer that calls: two million tokens, or a mebibyte of deltas and 1024 distributions
MESSAGE_BYTES = 16 * 2**20  # far above our messages; bounds the memory that a peer can make us use
MAX_FIELDS = 2**16  # of a message between parts; 1024 commits, deltas or plans together
MAX_TOGETHER = 1024  # commits or deltas that are sent in one message
UNCOUNTED_BYTES = 2**16  # a message of at most this size is decoded at once: it takes at most 6 MiB
_MAX_VARINT = 10  # bytes
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

MessageT = TypeVar("MessageT", bound=Message)
Kind: TypeAlias = Any  # a message's descriptor, whose class depends on how protobuf is implemented


class MessageBound(NamedTuple):
    """What a message may have at most."""

    size: int  # bytes
    fields: int = MAX_FIELDS
    when: str = ""  # the messages to which it applies; for the error

    def check(self, kind: Kind, data: bytes) -> None:
        """Raise InvalidRequest for a message that would take far more memory than it has bytes, or has too many."""
        if len(data) > self.size:
            raise InvalidRequest("message", f"has {len(data)} bytes, must have at most {self.size}{self.when}")
        if len(data) > UNCOUNTED_BYTES and more_fields_than(kind, self.fields, data):
            raise InvalidRequest("message", f"must have at most {self.fields} fields; send it in several parts")


LONG = MessageBound(MESSAGE_BYTES)  # of an upstream: tokens of a session, or features
SHORT = MessageBound(2**16)  # names and numbers
REQUEST = MessageBound(REQUEST_BYTES)  # tokens of a prompt; deltas
BEFORE_A_TICKET = MessageBound(2**14, when=" before a ticket admits the drafter")  # a Hello, a Subscribe

_LONG_METHODS = ("Decode", "Warm")
_REQUESTS = {
    f"/{service.full_name}/{method.name}": (method.input_type, REQUEST if method.name in _LONG_METHODS else SHORT)
    for service in (
        verifier_pb2.DESCRIPTOR.services_by_name["Verifier"],
        drafter_pb2.DESCRIPTOR.services_by_name["Drafter"],
    )
    for method in service.methods
}


def decode(kind: type[MessageT], bound: MessageBound, data: bytes) -> MessageT:
    """Return the decoded message. Raises InvalidRequest for one beyond the bound, DecodeError for other bytes."""
    bound.check(kind.DESCRIPTOR, data)
    return kind.FromString(data)


def _checked(kind: Kind, bound: MessageBound, decode: Callable[[bytes], Any], data: bytes) -> Any:
    bound.check(kind, data)
    return decode(data)


class BoundedRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in its stubs
    """Checks the requests of routers and tools to verifiers and drafters. A handler without a decoder decodes, and
    checks, itself."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler, with a decoder that checks."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None or details.method not in _REQUESTS:
            return handler
        kind, bound = _REQUESTS[details.method]
        return handler._replace(request_deserializer=partial(_checked, kind, bound, handler.request_deserializer))


def more_fields_than(kind: Kind, most: int, data: bytes) -> bool:
    """Return whether a message, with the messages in it that may list others, has more than `most` fields.

    Look at no more than `most` fields, whatever the length. Of bytes that do not parse the fields up to there count.
    """
    fields, parts = 0, [(0, len(data), _listing_fields(kind))]
    try:
        while parts:
            at, end, listing = parts.pop()
            while at < end:
                fields += 1
                if fields > most:
                    return True
                tag, at = _varint(data, at)
                match tag & 7:
                    case 0:  # a variable-length number
                        _, at = _varint(data, at)
                    case 1:  # eight bytes
                        at += 8
                    case 2:  # a length and its bytes
                        size, at = _varint(data, at)
                        if (below := listing.get(tag >> 3)) is not None:
                            parts.append((at, min(at + size, end), _listing_fields(below)))
                        at += size
                    case 5:  # four bytes
                        at += 4
    except (IndexError, ValueError):
        pass
    return False


@cache
def _listing_fields(kind: Kind) -> dict[int, Kind]:
    """Return the message's fields, by number, whose messages may take far more memory than they have bytes."""
    return {field.number: field.message_type for field in kind.fields if _lists(field.message_type)}


@cache
def _lists(kind: Kind) -> bool:
    """Return whether a message of this kind may list messages, strings or bytes, itself or in a message in it. Messages
    in one `oneof` count as listed: each that takes another's place takes memory of its own."""
    return kind is not None and any(
        _is_listed(field) or (field.message_type is not None and _lists(field.message_type)) for field in kind.fields
    )


def _is_listed(field: FieldDescriptor) -> bool:
    if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
        return field.message_type is not None
    return field.is_repeated and (field.message_type is not None or field.type in _TEXTS)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length number and the position behind it. Raises IndexError or ValueError."""
    value = data[at]
    if value < 0x80:  # as nearly all are
        return value, at + 1
    value &= 0x7F
    for index in range(1, _MAX_VARINT):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number of too many bytes")
