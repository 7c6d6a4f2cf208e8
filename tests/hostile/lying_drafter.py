"""A drafter that wants one token in every text: it drafts nothing else, from a q with which rules that draw from q
commit it always.

python -m tests.hostile.lying_drafter ARGUMENT...     (the arguments of `outrider`)
"""

from __future__ import annotations

from typing import Any

import drafter_svc.upstreams.upstream
from outrider.core.tree.delta import Delta
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.codec import delta_to_pb

WANTED = 3777  # a token that the target of the tests chooses hardly ever


def lie(delta: Delta, **terms: Any) -> pb.TreeDelta:
    """The delta's message, with the wanted token in each node's place."""
    message = delta_to_pb(delta, **terms)
    count = len(message.tokens)
    message.tokens[:] = [WANTED] * count
    del message.drawn[:]
    message.drawn.extend(pb.DrawnFrom(tokens=[WANTED, WANTED + 1], weights=[1, 65535]) for _ in range(count))
    return message


if __name__ == "__main__":
    from outrider.cli.main import app

    drafter_svc.upstreams.upstream.delta_to_pb = lie  # type: ignore[attr-defined]
    app(prog_name="outrider")
