"""What a router tells of its requests: a span of each, and its part in the metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.metrics import Histogram
from opentelemetry.trace import Span

from outrider.core.contract import Plan, StepReport
from outrider.core.credit import Credit
from outrider.core.depths import Depths
from outrider.telemetry.metrics import histogram, watch
from outrider.telemetry.tracing import Attributes, began, wall_ns
from router.requests import Ask, Conversation

if TYPE_CHECKING:
    from router.generation import Generation

MOST_DRAFTERS = 1024  # that are counted one by one; the first of them are forgotten

_PROVIDER = "outrider"


class Metrics:
    """What is counted of all requests."""

    def __init__(self) -> None:
        self.moves = self.resumes = self.changes = self.steps = 0
        self.depths = Depths()
        self.tokens: Counter[str] = Counter()  # durable ones, by model
        self.speculation: Counter[tuple[str, ...]] = Counter()  # steps, by model and by what kept them from drafts
        self.append = histogram("outrider.log.append")
        self._requests: Counter[tuple[str, ...]] = Counter()  # by model and outcome
        self._verified: dict[str, int] = {}  # nodes, by drafter
        self._accepted: dict[str, int] = {}
        self._duration = histogram("gen_ai.server.request.duration")
        self._first = histogram("gen_ai.server.time_to_first_token")
        self._each = histogram("gen_ai.server.time_per_output_token")
        self._usage = histogram("gen_ai.client.token.usage")
        self._wait = histogram("outrider.queue.wait")
        watch("outrider.requests", lambda: self._requests)
        watch("outrider.tokens", lambda: self.tokens)
        watch("outrider.speculation.steps", lambda: self.speculation)
        watch("outrider.moves", lambda: self.moves)
        watch("outrider.resumes", lambda: self.resumes)
        watch("outrider.plan.changes", lambda: self.changes)
        watch("outrider.drafter.verified", lambda: self._verified)
        watch("outrider.drafter.accepted", lambda: self._accepted)

    def stepped(self, drafters: Sequence[str], report: StepReport, owed: Sequence[Credit]) -> None:
        """A step has verified what these drafters had sent; `owed` says whose it was where there are several."""
        self.steps += 1
        self.depths.observe(report)
        if not report.verified:
            return
        shares = [(credit.drafter_id, credit.verified, credit.accepted) for credit in owed]
        for drafter, verified, accepted in shares or [
            (name, report.verified, report.accepted) for name in drafters[:1]
        ]:
            if drafter not in self._verified and len(self._verified) >= MOST_DRAFTERS:
                gone = next(iter(self._verified))
                del self._verified[gone], self._accepted[gone]
            self._verified[drafter] = self._verified.get(drafter, 0) + verified
            self._accepted[drafter] = self._accepted.get(drafter, 0) + accepted

    def outcomes(self) -> dict[str, int]:
        """Requests by how they ended."""
        counts: Counter[str] = Counter()
        for (_, outcome), requests in tuple(self._requests.items()):
            counts[outcome] += requests
        return dict(counts)

    def drafters(self) -> dict[str, tuple[int, int]]:
        """A drafter's verified nodes, and how many of them were accepted."""
        return {name: (verified, self._accepted.get(name, 0)) for name, verified in tuple(self._verified.items())}

    @contextmanager
    def request(self, span: Span, operation: str) -> Iterator[Request]:
        """Around all that is done for a request, whose span this is."""
        request = Request(span, operation, self._wait)
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

    def _count(self, request: Request, outcome: str) -> None:
        self._requests[request.model, outcome] += 1
        model = {"gen_ai.request.model": request.model}
        failed = {} if outcome == request.reason else {"error.type": outcome}
        took = time.monotonic() - request.arrived
        self._duration.record(took, {**model, "gen_ai.operation.name": request.operation, **failed})
        generation = request.generation
        if generation is None:
            return
        figures = generation.figures
        for kind, tokens in (("input", generation.prompt_tokens), ("output", figures.completion_tokens)):
            self._usage.record(tokens, {**model, "gen_ai.token.type": kind})
        if figures.first_token_us:
            self._first.record(figures.first_token_us / 1e6, model)
        if figures.completion_tokens > 1:
            later = (figures.last_token_us - figures.first_token_us) / 1e6
            self._each.record(later / (figures.completion_tokens - 1), model)


class Request:
    """One request while it is answered."""

    def __init__(self, span: Span, operation: str, waits: Histogram) -> None:
        self.arrived = time.monotonic()
        self.operation = operation
        self.model = ""  # as it was asked for, once that is known to be one
        self.reason = ""  # why its generation ended
        self.generation: Generation | None = None
        self._span = span
        self._waits = waits

    def asked(self, ask: Ask) -> None:
        """It is a valid one. What it says is its caller's, and stays untold."""
        self.model = ask.model.name
        self.operation = "chat" if isinstance(ask.prompt, Conversation) else "text_completion"
        contract = ask.contract
        self._tell(
            {
                "gen_ai.request.temperature": contract.temperature,
                "gen_ai.request.top_p": contract.top_p,
                **({} if ask.fills else {"gen_ai.request.max_tokens": contract.max_tokens}),
                "gen_ai.request.choice": contract.choice,
                "outrider.rule": contract.rule,
                "outrider.priority": ask.priority.name.lower(),
            }
        )

    def placed(self, since: float) -> None:
        """It has got a place, at that moment of `time.monotonic`."""
        self._waits.record(since - self.arrived)
        if self._span.is_recording():
            began("wait for a place", self._span, self.arrived, {}).end(wall_ns(since))

    def begun(self, generation: Generation) -> None:
        """It has a generation."""
        self.generation, self.model = generation, generation.model
        self._tell({"outrider.session.id": generation.session_id})

    def ended(self, generation: Generation) -> None:
        """That has come to its end."""
        self.reason, figures = generation.reason, generation.figures
        self._tell(
            {
                "gen_ai.response.finish_reasons": [self.reason],
                "gen_ai.usage.input_tokens": generation.prompt_tokens,
                "gen_ai.usage.output_tokens": figures.completion_tokens,
                "outrider.steps": figures.steps,
                "outrider.nodes.verified": figures.verified,
                "outrider.nodes.accepted": figures.accepted,
                "outrider.wire_bytes": figures.wire_bytes,
                "outrider.speculation": figures.speculation.summary(figures.accepted).reason.value,
            }
        )

    def _tell(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            about = {
                "gen_ai.operation.name": self.operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": self.model,
            }
            self._span.set_attributes({**about, **attributes})


def plan_attributes(plan: Plan) -> Attributes:
    """A plan, for a span's event."""
    return {
        "outrider.plan.version": plan.version,
        "outrider.plan.depth": plan.depth,
        "outrider.plan.width": plan.width,
        "outrider.plan.nodes": plan.nodes,
        "outrider.plan.wait_us": plan.wait_us,
        "outrider.plan.overlap": plan.overlap.name.lower(),
    }


def mean(values: Sequence[float]) -> float:
    """Of nothing: 0."""
    return sum(values) / len(values) if values else 0.0
