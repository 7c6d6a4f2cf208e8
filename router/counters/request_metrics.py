"""A span for each request, and the router's metrics of requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from opentelemetry.metrics import Histogram
from opentelemetry.trace import Span

from outrider.core.control.depth.depth_stats import Depths
from outrider.core.control.drafters.contributions import DrafterContribution
from outrider.core.session.contract import Plan, StepReport
from outrider.telemetry.metrics import histogram, register_metric
from outrider.telemetry.tracing import Attributes, start_span, wall_ns
from router.counters.usage_stats import UsageStats
from router.requests.requests import Conversation, GenerateParams

MAX_DRAFTERS = 1024  # drafters that are counted one by one; the oldest entries are dropped

_PROVIDER = "outrider"


class MeasuredGeneration(Protocol):
    """What is recorded of a generation."""

    session_id: str
    model: str  # its name
    reason: str  # why it ended

    @property
    def prompt_tokens(self) -> int:
        """How many tokens its prompt has."""

    @property
    def usage(self) -> UsageStats:
        """What it cost, and what speculation brought."""


class RouterMetrics:
    """Counters and histograms over all requests."""

    def __init__(self) -> None:
        self.moves = self.resumes = self.changes = self.steps = 0
        self.depths = Depths()
        self.tokens: Counter[str] = Counter()  # durable tokens, by model
        self.speculation: Counter[tuple[str, ...]] = Counter()  # steps, by model and speculation status
        self.append = histogram("outrider.log.append")
        self._requests: Counter[tuple[str, ...]] = Counter()  # by model and outcome
        self._verified: dict[str, int] = {}  # nodes, by drafter
        self._accepted: dict[str, int] = {}
        self._duration = histogram("gen_ai.server.request.duration")
        self._first = histogram("gen_ai.server.time_to_first_token")
        self._each = histogram("gen_ai.server.time_per_output_token")
        self._usage = histogram("gen_ai.client.token.usage")
        self._wait = histogram("outrider.queue.wait")
        register_metric("outrider.requests", lambda: self._requests)
        register_metric("outrider.tokens", lambda: self.tokens)
        register_metric("outrider.speculation.steps", lambda: self.speculation)
        register_metric("outrider.moves", lambda: self.moves)
        register_metric("outrider.resumes", lambda: self.resumes)
        register_metric("outrider.plan.changes", lambda: self.changes)
        register_metric("outrider.drafter.verified", lambda: self._verified)
        register_metric("outrider.drafter.accepted", lambda: self._accepted)

    def observe_step(
        self, drafters: Sequence[str], report: StepReport, contributions: Sequence[DrafterContribution]
    ) -> None:
        """Count a step that verified drafters' nodes. `contributions` splits them if there are several drafters."""
        self.steps += 1
        self.depths.observe(report)
        if not report.verified:
            return
        shares = [(each.drafter_id, each.verified, each.accepted) for each in contributions]
        for drafter, verified, accepted in shares or [
            (name, report.verified, report.accepted) for name in drafters[:1]
        ]:
            if drafter not in self._verified and len(self._verified) >= MAX_DRAFTERS:
                gone = next(iter(self._verified))
                del self._verified[gone], self._accepted[gone]
            self._verified[drafter] = self._verified.get(drafter, 0) + verified
            self._accepted[drafter] = self._accepted.get(drafter, 0) + accepted

    def outcomes(self) -> dict[str, int]:
        """Return the number of requests by outcome."""
        counts: Counter[str] = Counter()
        for (_, outcome), requests in tuple(self._requests.items()):
            counts[outcome] += requests
        return dict(counts)

    def drafters(self) -> dict[str, tuple[int, int]]:
        """Return each drafter's verified nodes, and how many of them were accepted."""
        return {name: (verified, self._accepted.get(name, 0)) for name, verified in tuple(self._verified.items())}

    @contextmanager
    def request(self, span: Span, operation: str) -> Iterator[RequestMetrics]:
        """Yield the metrics of one request, whose span is given, while the request is answered."""
        request = RequestMetrics(span, operation, self._wait)
        outcome = "cancelled"
        try:
            yield request
            outcome = request.reason
        except asyncio.CancelledError:
            raise
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._count(request, outcome)

    def _count(self, request: RequestMetrics, outcome: str) -> None:
        self._requests[request.model, outcome] += 1
        model = {"gen_ai.request.model": request.model}
        failed = {} if outcome == request.reason else {"error.type": outcome}
        took = time.monotonic() - request.arrived
        self._duration.record(took, {**model, "gen_ai.operation.name": request.operation, **failed})
        generation = request.generation
        if generation is None:
            return
        usage = generation.usage
        for kind, tokens in (("input", generation.prompt_tokens), ("output", usage.completion_tokens)):
            self._usage.record(tokens, {**model, "gen_ai.token.type": kind})
        if usage.first_token_us:
            self._first.record(usage.first_token_us / 1e6, model)
        if usage.completion_tokens > 1:
            later = (usage.last_token_us - usage.first_token_us) / 1e6
            self._each.record(later / (usage.completion_tokens - 1), model)


class RequestMetrics:
    """The span and measurements of one request while it is answered."""

    def __init__(self, span: Span, operation: str, waits: Histogram) -> None:
        self.arrived = time.monotonic()
        self.operation = operation
        self.model = ""  # the requested model, once it is known to be served
        self.reason = ""  # why the generation ended
        self.generation: MeasuredGeneration | None = None
        self._span = span
        self._waits = waits

    def on_parsed(self, params: GenerateParams) -> None:
        """Record the parameters of a valid request. The prompt is the caller's and is not recorded."""
        self.model = params.model.name
        self.operation = "chat" if isinstance(params.prompt, Conversation) else "text_completion"
        contract = params.contract
        self._set_attributes(
            {
                "gen_ai.request.temperature": contract.temperature,
                "gen_ai.request.top_p": contract.top_p,
                **({} if params.fills_context else {"gen_ai.request.max_tokens": contract.max_tokens}),
                "gen_ai.request.choice": contract.choice,
                "outrider.rule": contract.rule,
                "outrider.priority": params.priority.name.lower(),
            }
        )

    def on_admitted(self, since: float) -> None:
        """Record that the request got a slot at `since`, a time of `time.monotonic`."""
        self._waits.record(since - self.arrived)
        if self._span.is_recording():
            start_span("wait for a place", self._span, self.arrived, {}).end(wall_ns(since))

    def on_started(self, generation: MeasuredGeneration) -> None:
        """Record the request's generation."""
        self.generation, self.model = generation, generation.model
        self._set_attributes({"outrider.session.id": generation.session_id})

    def on_finished(self, generation: MeasuredGeneration) -> None:
        """Record the end of the generation."""
        self.reason, usage = generation.reason, generation.usage
        self._set_attributes(
            {
                "gen_ai.response.finish_reasons": [self.reason],
                "gen_ai.usage.input_tokens": generation.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "outrider.steps": usage.steps,
                "outrider.nodes.verified": usage.verified,
                "outrider.nodes.accepted": usage.accepted,
                "outrider.wire_bytes": usage.wire_bytes,
                "outrider.speculation": usage.speculation.summary(usage.accepted).reason.value,
            }
        )

    def _set_attributes(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            about = {
                "gen_ai.operation.name": self.operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": self.model,
            }
            self._span.set_attributes({**about, **attributes})


def plan_attributes(plan: Plan) -> Attributes:
    """Return a plan as the attributes of a span event."""
    return {
        "outrider.plan.version": plan.version,
        "outrider.plan.depth": plan.depth,
        "outrider.plan.width": plan.width,
        "outrider.plan.nodes": plan.nodes,
        "outrider.plan.wait_us": plan.wait_us,
        "outrider.plan.overlap": plan.overlap.name.lower(),
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0
