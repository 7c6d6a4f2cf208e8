"""Messages between a server and the process of a grammar.

A request is a JSON list behind its length: an operation and its inputs. Each request has one answer, in the same order:
a header and a payload.
"""

from __future__ import annotations

import struct
from enum import IntEnum

LENGTH = struct.Struct("<I")  # bytes of the JSON that follows
ANSWER = struct.Struct("<IBdI")  # bytes of the payload, `Status`, processor seconds of the process, KiB of the grammar


class Status(IntEnum):
    """What an answer's payload is."""

    DONE = 0  # what the request is documented to return
    REFUSED = 1  # the reason, as text: the grammar cannot be compiled or followed
    BROKEN = 2  # the reason, as text: this model has no grammars
