"""Every decoder of bytes from a peer, called by itself: a value, or one of our errors, for whatever comes."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from outrider.client import _wire
from outrider.core.session.contract import Contract, Plan
from outrider.errors import Forbidden, InternalError, InvalidRequest, OutriderError, Unauthenticated
from outrider.rpc import liveness, status
from outrider.rpc.authorization import certificate_names
from outrider.rpc.status import CLASS_KEY, FIELD_KEY, RETRY_KEY
from outrider.store import acceptance_priors, api_keys, records, registry
from outrider.store.redis.client import load_object
from outrider.v1 import drafter_pb2
from outrider.wire import drafter, tickets, types
from router.api.auth import ApiKeyAuthenticator
from router.counters.usage_stats import UsageStats
from tests.hostile import frames
from tests.hostile.rig import VOCABULARY, resident_bytes

RUN = 2_500  # inputs of one run of hypothesis, which remembers all that it drew
GROWTH = 32 * 2**20  # bytes that one decoder's inputs may add
COUNTS = [
    pytest.param(100, id="100"),
    pytest.param(50_000, id="50000", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DEEP = b"[" * 100_000  # deeper than Python's stack
blobs = st.one_of(
    st.binary(max_size=40), values.map(lambda value: json.dumps(value).encode()), st.sampled_from((DEEP, b"{}", b"[]"))
)


def nearly(good: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """JSON objects of ours with some of their fields gone, or something else."""
    broken = st.dictionaries(st.sampled_from(sorted(good)), values, max_size=3)
    gone = st.sets(st.sampled_from(sorted(good)), max_size=1)

    def mangled(changes: dict[str, Any], without: set[str]) -> bytes:
        return json.dumps({name: value for name, value in (good | changes).items() if name not in without}).encode()

    return st.one_of(blobs, st.builds(mangled, broken, gone))


TURN = records.SessionTurn(Contract(seed=1, max_tokens=9), ("x",), answer_position=4, deadline=None)
RECORD = records.SessionRecord("s", "t", "m", b"d", generation=1, turn=TURN, plan=Plan(depth=4))
WORKER = registry.Worker("v1", "verifier", "127.0.0.1:1", "m", b"d", 9, 9, 8, 0, 1)
FIELDS = {name: value.encode() if isinstance(value, str) else value for name, value in records.dump(RECORD).items()}
turns = nearly(json.loads(records.dump_turn(TURN)))
changes = st.dictionaries(
    st.sampled_from(sorted(FIELDS)),
    st.one_of(blobs, st.integers().map(lambda number: str(number).encode())),
    max_size=3,
)
record_fields = st.builds(
    lambda changed, gone: {name: value for name, value in (FIELDS | changed).items() if name != gone},
    st.one_of(changes, turns.map(lambda turn: {"turn": turn})),
    st.sampled_from(["", *FIELDS]),
)
headers = st.one_of(
    st.text(max_size=20), st.integers().map(str), st.just("9" * 5000), st.sampled_from(["²", "-1", "InvalidRequest"])
)
PERMIT = tickets.Permit("s", "t", "d", "u", 1)
SIGNER = tickets.TicketSigner(time.time)
signed = st.builds(
    lambda epoch, cut, tail: SIGNER.sign(tickets.Permit("s", "t", "d", "u", epoch))[:cut] + tail,
    st.integers(0, 2),
    st.integers(0, 160),
    st.binary(max_size=3),
)
hints = frames.messages(
    drafter_pb2.Hints,
    root_position=frames.huge,
    parents=st.lists(frames.unsigned, max_size=6),
    tokens=st.lists(frames.tokens, max_size=6),
    edges=st.binary(max_size=6),
)


class Peer:
    """A call's context that holds the given values about its caller."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def auth_context(self) -> Any:
        return {"peer_dns": self._values}

    def invocation_metadata(self) -> Any:
        return self._values


def rpc_error(fields: dict[str, Any]) -> OutriderError:
    code = list(grpc.StatusCode)[fields.pop("code") % len(grpc.StatusCode)]
    metadata = grpc.aio.Metadata(*((name, value) for name, value in fields.items() if name != "details"))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, fields.get("details"))
    translated = status.from_rpc_error(error)
    assert isinstance(translated, OutriderError)
    assert getattr(translated, "retry_after", 0.0) < 1e7
    return translated


class Known(api_keys.Keys):
    """API keys of which one is there, without Redis."""

    def __init__(self) -> None:
        self._known = {}

    async def find(self, secret: str) -> api_keys.ApiKey:
        api_keys.secret_digest(secret)
        raise Unauthenticated("unknown")


def called(metadata: Any) -> None:
    """Runs the coroutine, which waits for nothing."""
    try:
        ApiKeyAuthenticator(Known()).tenant(Peer(metadata), "").send(None)  # type: ignore[arg-type]
    except StopIteration:
        raise AssertionError("a caller without a key was let in") from None


def taught(blob: bytes) -> None:
    counts, times = acceptance_priors.load_priors("x", blob)
    assert counts.steps >= 0.0
    assert all(seconds >= 0.0 for seconds in times.values())


DECODERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], object], tuple[type[Exception], ...]]] = {
    "contracts": (frames.contracts, types.contract_from_pb, (InvalidRequest,)),
    "plans": (frames.plans, types.plan_from_pb, (InvalidRequest,)),
    "reports": (
        frames.reports,
        lambda report: UsageStats().observe(types.report_from_pb(report), 1),
        (InvalidRequest,),
    ),
    "deltas": (frames.deltas(), lambda delta: drafter.delta_from_pb(delta, VOCABULARY), (InvalidRequest,)),
    "hints": (hints, lambda message: drafter.hints_from_pb(message, VOCABULARY), (InvalidRequest,)),
    "features": (st.binary(max_size=24), lambda data: drafter.features_from_pb(data, 2), (InvalidRequest,)),
    "heartbeats": (frames.heartbeats, lambda beat: liveness.check_heartbeat(beat, "x"), ()),
    "tickets": (
        st.one_of(st.binary(max_size=80), signed),
        lambda blob: tickets.check(lambda key: key == SIGNER.public_key, blob, PERMIT, time.time),
        (Forbidden,),
    ),
    "certificates": (st.lists(st.binary(max_size=20), max_size=3), lambda names: certificate_names(Peer(names)), ()),  # type: ignore[arg-type]
    "authorization": (
        st.lists(
            st.tuples(st.sampled_from(["authorization", "x"]), st.one_of(headers, headers.map("Bearer {}".format))),
            max_size=3,
        ),
        called,
        (Unauthenticated,),
    ),
    "statuses": (
        st.fixed_dictionaries(
            {"code": st.integers(0, 99)},
            optional={
                "details": st.text(),
                CLASS_KEY: st.one_of(headers, st.sampled_from(["Overloaded", "Moved"])),
                FIELD_KEY: headers,
                RETRY_KEY: headers,
            },
        ),
        rpc_error,
        (),
    ),
    "chunks": (frames.chunks, _wire.chunk_from_pb, (InternalError,)),
    "reasons": (st.integers(), _wire.reason_from_pb, (InternalError,)),
    "records": (record_fields, lambda fields: records.load("s", fields), (InternalError,)),
    "turns": (turns, records.load_turn, (InternalError,)),
    "log entries": (blobs, records.unpack, (InternalError,)),
    "usages": (
        nearly(json.loads(UsageStats().dump())).map(lambda blob: blob.decode(errors="replace")),
        UsageStats,
        (InternalError,),
    ),
    "workers": (
        nearly(json.loads(registry.dump_worker(WORKER, 3.0))),
        lambda blob: registry.load_worker(blob, "verifier"),
        (),
    ),
    "api keys": (
        nearly({"key_id": "k", "tenant": "t", "name": "n", "created": 1.0, "expires": None}),
        lambda blob: api_keys.load_key(blob).expired,
        (InternalError,),
    ),
    "lessons": (nearly({"counts": [0.0] * 144, "times": {"step": 0.1}}), taught, ()),
    "claims": (
        nearly({"session_id": "s/1", "fingerprint": "00"}),
        lambda blob: load_object(blob, "x"),
        (InternalError,),
    ),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_returns_a_value_or_raises_its_error(name: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "outrider")  # pytest keeps what is logged: a warning for each input
    inputs, decode, refusals = DECODERS[name]
    held: list[int] = []  # after each run: the first fills hypothesis' own heap
    for number in range(max(1, count // RUN)):

        @seed(number)
        @settings(max_examples=min(count, RUN), database=None, suppress_health_check=list(HealthCheck))
        @given(inputs)
        def some(blob: Any) -> None:
            with suppress(*refusals):
                decode(blob)

        some()
        gc.collect()  # what hypothesis leaves in cycles is not ours
        held.append(resident_bytes())
    assert held[-1] - held[0] < GROWTH
