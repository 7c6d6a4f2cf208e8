"""Every metric that a server tells of, in one list: what is not here does not exist.

Names are those of OpenTelemetry's semantic conventions for generative AI where it has one, of vLLM's speculative
decoding (`spec_decode_*`) where that has one, and else begin with `outrider`. Prometheus sees dots as underscores, the
unit behind the name, and `_total` behind a counter's.
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
    role: str  # of the servers that tell it
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram

    @property
    def exposed(self) -> str:
        """Its name in Prometheus; a histogram's has `_bucket`, `_sum` or `_count` behind it."""
        name = self.name.replace(".", "_")
        name += {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return name + ("_total" if self.kind == "counter" else "")


_MODEL = ("gen_ai.request.model",)
_TASKS = "router, verifier, drafter"
_ALL = "router, verifier, drafter, gateway"

METRICS = (
    Metric(
        "gen_ai.server.request.duration",
        "histogram",
        "s",
        "router",
        "From a request's arrival to its end.",
        (*_MODEL, "gen_ai.operation.name", "error.type"),
        SECONDS,
    ),
    Metric(
        "gen_ai.server.time_to_first_token",
        "histogram",
        "s",
        "router",
        "From a request's arrival to its first token.",
        _MODEL,
        SECONDS,
    ),
    Metric(
        "gen_ai.server.time_per_output_token",
        "histogram",
        "s",
        "router",
        "Of a generation: seconds of each token after the first.",
        _MODEL,
        MILLISECONDS,
    ),
    Metric(
        "gen_ai.client.token.usage",
        "histogram",
        "{token}",
        "router",
        "Tokens of a request: its input and its output.",
        (*_MODEL, "gen_ai.token.type"),
        TOKENS,
    ),
    Metric("outrider.requests", "counter", "{request}", "router", "Requests, by how they ended.", (*_MODEL, "outcome")),
    Metric("outrider.requests.running", "gauge", "{request}", "router", "Generations that run."),
    Metric("outrider.queue.depth", "gauge", "{request}", "router", "Requests that wait for a place.", ("priority",)),
    Metric("outrider.queue.wait", "histogram", "s", "router", "How long requests waited.", (), SECONDS),
    Metric("outrider.tokens", "counter", "{token}", "router", "Tokens that are durable: goodput.", _MODEL),
    Metric("outrider.gamma", "gauge", "{token}", "router", "Ceiling on gamma, over the generations that run: mean."),
    Metric("outrider.plan.changes", "counter", "{change}", "router", "Plans that replaced another one."),
    Metric("outrider.log.append", "histogram", "s", "router", "Until Redis had a commit's tokens.", (), MILLISECONDS),
    Metric(
        "outrider.speculation.steps",
        "counter",
        "{step}",
        "router",
        "Steps, by whether they verified drafts or what kept them from it.",
        (*_MODEL, "reason"),
    ),
    Metric("outrider.moves", "counter", "{move}", "router", "Generations that went on at another verifier."),
    Metric("outrider.resumes", "counter", "{resume}", "router", "Generations that were taken over."),
    Metric("outrider.drafter.verified", "counter", "{token}", "router", "A drafter's verified nodes.", ("drafter",)),
    Metric("outrider.drafter.accepted", "counter", "{token}", "router", "Of these, the committed.", ("drafter",)),
    Metric("outrider.examples.written", "counter", "{example}", "router", "Examples for drafters to learn from."),
    Metric("outrider.examples.dropped", "counter", "{example}", "router", "Examples that Redis did not take."),
    Metric("outrider.workers", "gauge", "{worker}", "router", "Workers that are announced.", ("role",)),
    Metric("outrider.slots", "gauge", "{session}", "verifier", "Sessions that there is room for."),
    Metric("outrider.sessions", "gauge", "{session}", "verifier, drafter", "Sessions that are open."),
    Metric("outrider.kv.tokens", "gauge", "{token}", "verifier", "Tokens of open sessions whose KV is held."),
    Metric("outrider.kv.capacity", "gauge", "{token}", "verifier", "Tokens whose KV there is room for."),
    Metric(
        "outrider.kv.preemptions",
        "counter",
        "{session}",
        "verifier, drafter",
        "Sessions whose KV went, for want of memory, to be computed again.",
    ),
    Metric("outrider.steps", "counter", "{step}", "verifier", "Forward passes."),
    Metric("outrider.step.rows", "counter", "{token}", "verifier", "Tokens in all passes."),
    Metric("outrider.step.forward", "histogram", "s", "verifier", "Of a forward pass.", (), MILLISECONDS),
    Metric("outrider.step.wait", "histogram", "s", "verifier", "How long a step was held back.", (), MILLISECONDS),
    Metric("outrider.draft.reply", "histogram", "s", "verifier", "Commit to first delta after it.", (), MILLISECONDS),
    Metric("outrider.tokens.committed", "counter", "{token}", "verifier", "Tokens that steps committed."),
    Metric("outrider.wire", "counter", "By", "verifier", "Bytes on drafters' streams, both directions."),
    Metric("outrider.drafters", "gauge", "{drafter}", "verifier, drafter", "Draft streams that are open."),
    Metric("outrider.frames.refused", "counter", "{frame}", "verifier, drafter", "Frames of peers that were refused."),
    Metric("spec_decode_num_drafts", "counter", "{draft}", "verifier", "Trees that were verified."),
    Metric("spec_decode_num_draft_tokens", "counter", "{token}", "verifier", "Nodes that were verified."),
    Metric("spec_decode_num_accepted_tokens", "counter", "{token}", "verifier", "Of these, those that were committed."),
    Metric(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "{step}",
        "verifier",
        "Steps that verified a node so deep; position 0 is the first below the root.",
        ("position",),
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "{step}",
        "verifier",
        "Steps whose accepted path was so deep.",
        ("position",),
    ),
    Metric("outrider.draft.passes", "counter", "{pass}", "drafter", "Passes of the draft model."),
    Metric("outrider.draft.nodes", "counter", "{token}", "drafter", "Nodes that were sent."),
    Metric("outrider.draft.judged", "counter", "{token}", "drafter", "Places whose token a guess was held against."),
    Metric("outrider.draft.agreed", "counter", "{token}", "drafter", "Places where the best guess was the token."),
    Metric("outrider.version", "gauge", "{version}", "drafter", "Of its model; 0: what its own folder holds."),
    Metric("outrider.version.swaps", "counter", "{swap}", "drafter", "Versions that it went over to."),
    Metric("outrider.version.rollbacks", "counter", "{swap}", "drafter", "Swaps back to an earlier version."),
    Metric("outrider.loop.lag", "histogram", "s", _ALL, "How late the event loop runs what is due.", (), MILLISECONDS),
    Metric("outrider.loop.stalls", "counter", "{stall}", _ALL, "Times that it stood still for 0.1 s by itself."),
    Metric("outrider.tasks.failed", "counter", "{task}", _TASKS, "Ends of tasks that should not end.", ("task",)),
)
BY_NAME = {metric.name: metric for metric in METRICS}
