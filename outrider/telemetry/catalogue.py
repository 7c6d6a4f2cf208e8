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

METRICS = (
    Metric(
        "gen_ai.server.request.duration",
        "histogram",
        "s",
        "router",
        "Seconds from a request's arrival to its end.",
        (*_MODEL, "gen_ai.operation.name", "error.type"),
        SECONDS,
    ),
    Metric(
        "gen_ai.server.time_to_first_token",
        "histogram",
        "s",
        "router",
        "Seconds from a request's arrival to its first token.",
        _MODEL,
        SECONDS,
    ),
    Metric(
        "gen_ai.server.time_per_output_token",
        "histogram",
        "s",
        "router",
        "Mean seconds per token of a generation after the first token.",
        _MODEL,
        MILLISECONDS,
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
    Metric("outrider.requests", "counter", "{request}", "router", "Requests, by outcome.", (*_MODEL, "outcome")),
    Metric("outrider.requests.running", "gauge", "{request}", "router", "Running generations."),
    Metric("outrider.queue.depth", "gauge", "{request}", "router", "Queued requests.", ("priority",)),
    Metric("outrider.queue.wait", "histogram", "s", "router", "Seconds that requests waited for a slot.", (), SECONDS),
    Metric("outrider.tokens", "counter", "{token}", "router", "Durable tokens: goodput.", _MODEL),
    Metric("outrider.gamma", "gauge", "{token}", "router", "Ceiling on gamma: mean over the running generations."),
    Metric("outrider.plan.changes", "counter", "{change}", "router", "Plans that replaced an earlier one."),
    Metric(
        "outrider.log.append",
        "histogram",
        "s",
        "router",
        "Seconds until Redis had stored a commit's tokens.",
        (),
        MILLISECONDS,
    ),
    Metric(
        "outrider.speculation.steps",
        "counter",
        "{step}",
        "router",
        "Steps, by whether they verified drafts, or why not.",
        (*_MODEL, "reason"),
    ),
    Metric("outrider.moves", "counter", "{move}", "router", "Generations that moved to another verifier."),
    Metric("outrider.resumes", "counter", "{resume}", "router", "Resumed generations."),
    Metric("outrider.drafter.verified", "counter", "{token}", "router", "Verified nodes of a drafter.", ("drafter",)),
    Metric("outrider.drafter.accepted", "counter", "{token}", "router", "Of these, the accepted ones.", ("drafter",)),
    Metric("outrider.examples.written", "counter", "{example}", "router", "Training samples written to Redis."),
    Metric("outrider.examples.dropped", "counter", "{example}", "router", "Training samples that Redis did not take."),
    Metric("outrider.workers", "gauge", "{worker}", "router", "Announced workers.", ("role",)),
    Metric("outrider.slots", "gauge", "{session}", "verifier", "Sessions that fit at once."),
    Metric("outrider.sessions", "gauge", "{session}", "verifier, drafter", "Open sessions."),
    Metric("outrider.kv.tokens", "gauge", "{token}", "verifier", "Tokens of open sessions whose KV is in memory."),
    Metric("outrider.kv.capacity", "gauge", "{token}", "verifier", "Tokens whose KV fits into memory."),
    Metric(
        "outrider.kv.preemptions",
        "counter",
        "{session}",
        "verifier, drafter",
        "Sessions whose KV was evicted for lack of memory and is computed again.",
    ),
    Metric("outrider.steps", "counter", "{step}", "verifier", "Forward passes."),
    Metric("outrider.step.rows", "counter", "{token}", "verifier", "Tokens in all forward passes."),
    Metric("outrider.step.forward", "histogram", "s", "verifier", "Seconds of a forward pass.", (), MILLISECONDS),
    Metric(
        "outrider.step.wait", "histogram", "s", "verifier", "Seconds for which a step was held back.", (), MILLISECONDS
    ),
    Metric(
        "outrider.draft.reply",
        "histogram",
        "s",
        "verifier",
        "Seconds from a commit to the first delta after it.",
        (),
        MILLISECONDS,
    ),
    Metric("outrider.tokens.committed", "counter", "{token}", "verifier", "Committed tokens."),
    Metric("outrider.wire", "counter", "By", "verifier", "Bytes on draft streams, both directions."),
    Metric("outrider.drafters", "gauge", "{drafter}", "verifier, drafter", "Open draft streams."),
    Metric("outrider.frames.refused", "counter", "{frame}", "verifier, drafter", "Refused frames of peers."),
    Metric("spec_decode_num_drafts", "counter", "{draft}", "verifier", "Verified trees."),
    Metric("spec_decode_num_draft_tokens", "counter", "{token}", "verifier", "Verified nodes."),
    Metric("spec_decode_num_accepted_tokens", "counter", "{token}", "verifier", "Of these, the accepted ones."),
    Metric(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "{step}",
        "verifier",
        "Steps that verified a node at this depth; position 0 is the first below the root.",
        ("position",),
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "{step}",
        "verifier",
        "Steps whose accepted path reached this depth.",
        ("position",),
    ),
    Metric("outrider.adapter.steps", "counter", "{step}", "verifier", "Verified trees of an adapter.", _ADAPTER),
    Metric("outrider.adapter.verified", "counter", "{token}", "verifier", "Their verified nodes.", _ADAPTER),
    Metric("outrider.adapter.accepted", "counter", "{token}", "verifier", "Of these, the accepted ones.", _ADAPTER),
    Metric("outrider.draft.passes", "counter", "{pass}", "drafter", "Forward passes of the draft model."),
    Metric(
        "outrider.draft.forward",
        "histogram",
        "s",
        "drafter",
        "Seconds of a forward pass of the draft model.",
        (),
        MILLISECONDS,
    ),
    Metric("outrider.draft.nodes", "counter", "{token}", "drafter", "Sent nodes."),
    Metric(
        "outrider.draft.compared",
        "counter",
        "{token}",
        "drafter",
        "Positions at which a draft was compared with the committed token.",
    ),
    Metric(
        "outrider.draft.agreed",
        "counter",
        "{token}",
        "drafter",
        "Positions at which the best draft was the committed token.",
    ),
    Metric(
        "outrider.version",
        "gauge",
        "{version}",
        "drafter",
        "Version of the drafter's model; 0: the checkpoint in its own folder.",
    ),
    Metric("outrider.version.swaps", "counter", "{swap}", "drafter", "Switches to another version."),
    Metric("outrider.version.rollbacks", "counter", "{swap}", "drafter", "Switches back to an earlier version."),
    Metric(
        "outrider.gateway.requests",
        "counter",
        "{request}",
        "gateway",
        "Answered requests; 499 is a client that went away.",
        ("path", "status"),
    ),
    Metric("outrider.gateway.running", "gauge", "{request}", "gateway", "Running requests."),
    Metric(
        "outrider.gateway.duration",
        "histogram",
        "s",
        "gateway",
        "Seconds from a request to its answer's end.",
        ("path",),
        SECONDS,
    ),
    Metric(
        "outrider.loop.lag",
        "histogram",
        "s",
        _ALL_SERVERS,
        "Seconds by which the event loop runs callbacks late.",
        (),
        MILLISECONDS,
    ),
    Metric(
        "outrider.loop.stalls",
        "counter",
        "{stall}",
        _ALL_SERVERS,
        "Times that the process itself blocked its event loop for 0.1 s.",
    ),
    Metric(
        "outrider.process.ran",
        "counter",
        "s",
        _ALL_SERVERS,
        "Seconds for which the process's threads ran, while it served.",
    ),
    Metric(
        "outrider.process.waited",
        "counter",
        "s",
        _ALL_SERVERS,
        "Seconds for which they were ready to run, and waited for a core that others had.",
    ),
    Metric(
        "outrider.certificate.expiry",
        "gauge",
        "s",
        _ALL_SERVERS,
        "Unix time at which the server's certificate expires; 0 without TLS.",
    ),
    Metric(
        "outrider.clock.skew",
        "gauge",
        "s",
        _RPC_SERVERS,
        "Seconds by which the server's clock is ahead of Redis'; negative: behind.",
    ),
    Metric(
        "outrider.tasks.failed", "counter", "{task}", _RPC_SERVERS, "Unexpected ends of long-lived tasks.", ("task",)
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
