"""The catalogue of all metrics that servers export. A metric that is not listed here does not exist.

Names are those of OpenTelemetry's semantic conventions for generative AI if it has one, of vLLM's speculative decoding
(`spec_decode_*`) if that has one, and else begin with `outrider`. Prometheus shows dots as underscores, the unit behind
the name, and `_total` behind a counter's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

MILLISECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    kind: Kind
    unit: str  # by UCUM: "s", "By", "{token}"
    role: str  # the servers that export it
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram's buckets

    @property
    def exposed(self) -> str:
        """The metric's name in Prometheus; a histogram's has `_bucket`, `_sum` or `_count` behind it."""
        name = self.name.replace(".", "_")
        name += {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return name + ("_total" if self.kind == "counter" else "")


_MODEL = ("gen_ai.request.model",)
_ADAPTER = ("adapter",)
_RPC_SERVERS = "router, verifier, drafter"
_ALL_SERVERS = "router, verifier, drafter, gateway"


def _counter(name: str, unit: str, role: str, description: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", unit, role, description, labels)


def _gauge(name: str, unit: str, role: str, description: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "gauge", unit, role, description, labels)


def _seconds(
    name: str, role: str, description: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
) -> Metric:
    """Return a histogram of seconds."""
    return Metric(name, "histogram", "s", role, description, labels, buckets)


METRICS = (
    _seconds(
        "gen_ai.server.request.duration",
        "router",
        "Seconds from a request's arrival to its end.",
        SECONDS,
        (*_MODEL, "gen_ai.operation.name", "error.type"),
    ),
    _seconds(
        "gen_ai.server.time_to_first_token",
        "router",
        "Seconds from a request's arrival to its first token.",
        SECONDS,
        _MODEL,
    ),
    _seconds(
        "gen_ai.server.time_per_output_token",
        "router",
        "Mean seconds per token of a generation after the first token.",
        MILLISECONDS,
        _MODEL,
    ),
    Metric(
        "gen_ai.client.token.usage",
        "histogram",
        "{token}",
        "router",
        "Input and output tokens of a request.",
        (*_MODEL, "gen_ai.token.type"),
        TOKENS,
    ),
    _counter("outrider.requests", "{request}", "router", "Requests, by outcome.", (*_MODEL, "outcome")),
    _gauge("outrider.requests.running", "{request}", "router", "Running generations."),
    _gauge("outrider.queue.depth", "{request}", "router", "Queued requests.", ("priority",)),
    _seconds("outrider.queue.wait", "router", "Seconds that requests waited for a slot.", SECONDS),
    _counter("outrider.tokens", "{token}", "router", "Durable tokens: goodput.", _MODEL),
    _gauge("outrider.gamma", "{token}", "router", "Ceiling on gamma: mean over the running generations."),
    _counter("outrider.plan.changes", "{change}", "router", "Plans that replaced an earlier one."),
    _seconds("outrider.log.append", "router", "Seconds until Redis had stored a commit's tokens.", MILLISECONDS),
    _counter(
        "outrider.speculation.steps",
        "{step}",
        "router",
        "Steps, by whether they verified drafts, or why not.",
        (*_MODEL, "reason"),
    ),
    _counter("outrider.moves", "{move}", "router", "Generations that moved to another verifier."),
    _counter("outrider.resumes", "{resume}", "router", "Resumed generations."),
    _counter("outrider.drafter.verified", "{token}", "router", "Verified nodes of a drafter.", ("drafter",)),
    _counter("outrider.drafter.accepted", "{token}", "router", "Of these, the accepted ones.", ("drafter",)),
    _counter("outrider.examples.written", "{example}", "router", "Training samples written to Redis."),
    _counter("outrider.examples.dropped", "{example}", "router", "Training samples that Redis did not take."),
    _gauge("outrider.workers", "{worker}", "router", "Announced workers.", ("role",)),
    _gauge("outrider.slots", "{session}", "verifier", "Sessions that fit at once."),
    _gauge("outrider.sessions", "{session}", "verifier, drafter", "Open sessions."),
    _gauge("outrider.kv.tokens", "{token}", "verifier", "Tokens of open sessions whose KV is in memory."),
    _gauge("outrider.kv.capacity", "{token}", "verifier", "Tokens whose KV fits into memory."),
    _counter(
        "outrider.kv.preemptions",
        "{session}",
        "verifier, drafter",
        "Sessions whose KV was evicted for lack of memory and is computed again.",
    ),
    _counter("outrider.steps", "{step}", "verifier", "Forward passes."),
    _counter("outrider.step.rows", "{token}", "verifier", "Tokens in all forward passes."),
    _seconds("outrider.step.forward", "verifier", "Seconds of a forward pass.", MILLISECONDS),
    _seconds("outrider.step.wait", "verifier", "Seconds for which a step was held back.", MILLISECONDS),
    _seconds("outrider.draft.reply", "verifier", "Seconds from a commit to the first delta after it.", MILLISECONDS),
    _counter("outrider.tokens.committed", "{token}", "verifier", "Committed tokens."),
    _counter("outrider.wire", "By", "verifier", "Bytes on draft streams, both directions."),
    _gauge("outrider.drafters", "{drafter}", "verifier, drafter", "Open draft streams."),
    _counter("outrider.frames.refused", "{frame}", "verifier, drafter", "Refused frames of peers."),
    _counter("spec_decode_num_drafts", "{draft}", "verifier", "Verified trees."),
    _counter("spec_decode_num_draft_tokens", "{token}", "verifier", "Verified nodes."),
    _counter("spec_decode_num_accepted_tokens", "{token}", "verifier", "Of these, the accepted ones."),
    _counter(
        "spec_decode_num_draft_tokens_per_pos",
        "{step}",
        "verifier",
        "Steps that verified a node at this depth; position 0 is the first below the root.",
        ("position",),
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "{step}",
        "verifier",
        "Steps whose accepted path reached this depth.",
        ("position",),
    ),
    _counter("outrider.adapter.steps", "{step}", "verifier", "Verified trees of an adapter.", _ADAPTER),
    _counter("outrider.adapter.verified", "{token}", "verifier", "Their verified nodes.", _ADAPTER),
    _counter("outrider.adapter.accepted", "{token}", "verifier", "Of these, the accepted ones.", _ADAPTER),
    _counter("outrider.draft.passes", "{pass}", "drafter", "Forward passes of the draft model."),
    _seconds("outrider.draft.forward", "drafter", "Seconds of a forward pass of the draft model.", MILLISECONDS),
    _counter("outrider.draft.nodes", "{token}", "drafter", "Sent nodes."),
    _counter(
        "outrider.draft.compared",
        "{token}",
        "drafter",
        "Positions at which a draft was compared with the committed token.",
    ),
    _counter(
        "outrider.draft.agreed", "{token}", "drafter", "Positions at which the best draft was the committed token."
    ),
    _gauge(
        "outrider.version",
        "{version}",
        "drafter",
        "Version of the drafter's model; 0: the checkpoint in its own folder.",
    ),
    _counter("outrider.version.swaps", "{swap}", "drafter", "Switches to another version."),
    _counter("outrider.version.rollbacks", "{swap}", "drafter", "Switches back to an earlier version."),
    _counter(
        "outrider.gateway.requests",
        "{request}",
        "gateway",
        "Answered requests; 499 is a client that went away.",
        ("path", "status"),
    ),
    _gauge("outrider.gateway.running", "{request}", "gateway", "Running requests."),
    _seconds("outrider.gateway.duration", "gateway", "Seconds from a request to its answer's end.", SECONDS, ("path",)),
    _seconds("outrider.loop.lag", _ALL_SERVERS, "Seconds by which the event loop runs callbacks late.", MILLISECONDS),
    _counter(
        "outrider.loop.stalls",
        "{stall}",
        _ALL_SERVERS,
        "Times that the process itself blocked its event loop for 0.1 s.",
    ),
    _counter(
        "outrider.process.ran", "s", _ALL_SERVERS, "Seconds for which the process's threads ran, while it served."
    ),
    _counter(
        "outrider.process.waited",
        "s",
        _ALL_SERVERS,
        "Seconds for which they were ready to run, and waited for a core that others had.",
    ),
    _gauge(
        "outrider.certificate.expiry",
        "s",
        _ALL_SERVERS,
        "Unix time at which the server's certificate expires; 0 without TLS.",
    ),
    _gauge(
        "outrider.clock.skew",
        "s",
        _RPC_SERVERS,
        "Seconds by which the server's clock is ahead of Redis'; negative: behind.",
    ),
    _counter("outrider.tasks.failed", "{task}", _RPC_SERVERS, "Unexpected ends of long-lived tasks.", ("task",)),
)
BY_NAME = {metric.name: metric for metric in METRICS}
