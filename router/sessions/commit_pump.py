"""Takes the commits of a generation's verifier: each is logged, then acknowledged and sent on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.session.contract import FinishReason, Plan, StepReport
from outrider.core.session.decoding import PromptScores, ReceivedCommit
from outrider.errors import InternalError
from outrider.telemetry.tracing import recording_span
from router.counters.request_metrics import plan_attributes
from router.drafters.attached_drafters import DraftAssignment
from router.drafters.drafter_assignment import DrafterSet
from router.drafters.obstacles import StepStatuses
from router.scheduling.admission import AdmissionSlot
from router.sessions.context import DecodeResources
from router.sessions.outbox import ClientWatch, Outbox
from router.sessions.standby import Standby
from router.sessions.takeover import OpenedGeneration
from router.sessions.token_log import TokenLog
from router.sessions.verifier_client import DecodeEnd, DecodeStream

RENEWALS_PER_LEASE = 3
RELEASE_S = 20.0  # after the verifier last wanted drafters, when they are released to other sessions


class CommitPump:
    """Moves one generation's tokens from its verifiers to its log and its client, and keeps its plan and its drafters.

    `run` it for one verifier after another.
    """

    def __init__(
        self,
        resources: DecodeResources,
        opened: OpenedGeneration,
        slot: AdmissionSlot | None,
        outbox: Outbox,
        client_watch: ClientWatch,
        standby: Standby | None,
    ) -> None:
        """`slot`: None for a generation that has ended, for which nothing runs."""
        self.plan = opened.policy.plan()
        self._resources = resources
        self._opened = opened
        self._slot = slot
        self._outbox = outbox
        self._client_watch = client_watch
        self._standby = standby
        self._samples = resources.sample_writer.collector(opened.record.tenant, opened.model, opened.turn.contract)
        self._drafters: DrafterSet
        self._wanted = False  # whether the generation should have drafters
        self._wanted_at = -math.inf  # when the verifier last wanted them
        self._alone: Callable[[], dict[str, float]] = dict  # what each drafter alone had drafted
        self.contract = self._samples.verifier_contract(opened.turn.contract)  # for verifiers

    async def run(self, token_log: TokenLog, stream: DecodeStream) -> FinishReason:
        """Handle the verifier's commits until the response ends."""
        self._wanted, self._wanted_at = self._wants_drafters(stream.resting), -math.inf
        self._drafters = self._assign_drafters(token_log, stream)
        try:
            return await self._process_commits(token_log, stream)
        finally:
            self._drafters.detach_all()

    def estimates(self) -> dict[str, Any]:
        """Return what the plan and the set of drafters are decided from."""
        return {**self._opened.policy.estimates(), "alone_tokens_per_step": self._alone()}

    def close(self) -> None:
        """Write what is left of the training samples."""
        self._samples.flush()

    async def _process_commits(self, token_log: TokenLog, stream: DecodeStream) -> FinishReason:
        """Handle each commit: log it, acknowledge it, send it, and give its report to the policy."""
        response, policy = self._opened.response, self._opened.policy
        statuses = StepStatuses(self._resources.config, policy, stream.worker)
        while not isinstance(event := await stream.next(), DecodeEnd):
            if not isinstance(event, ReceivedCommit):
                if isinstance(event, PromptScores):
                    self._send_scores(event, token_log, stream)
                if token_log.idle_s > self._resources.config.lease_s / RENEWALS_PER_LEASE:
                    await token_log.renew()
                if self._opened.left_s <= 0.0:
                    return FinishReason.DEADLINE
                continue
            report = event.report
            await self._log_and_send(event, token_log, stream)
            self._record_status(report, statuses)
            if response.stopped:
                return FinishReason.STOP
            self._drafters.observe(len(event.tokens), report, event.contributions)
            policy.observe(report)
            if policy.plan() is not self.plan:
                self._change_plan(policy.plan(), stream)
            if self._wanted != (wanted := self._wants_drafters(report.resting)):
                self._wanted = wanted
                self._drafters.detach_all()
                self._drafters = self._assign_drafters(token_log, stream)
        if response.reason is None:
            raise InternalError(f"verifier {stream.worker.worker_id} ended the response before its contract did")
        return response.reason

    def _send_scores(self, scores: PromptScores, token_log: TokenLog, stream: DecodeStream) -> None:
        """Send log-probabilities of the prompt, and behind the last ones what the client lacks of the response."""
        response = self._opened.response
        self._outbox.replay(response.add_scores(scores, token_log.tokens), response.scored, 0)
        if not response.scoring:
            self._outbox.replay(self._opened.missing, response.position, response.text_offset)
        stream.acknowledge(self._outbox.limit)
        self._client_watch.start()

    async def _log_and_send(self, commit: ReceivedCommit, token_log: TokenLog, stream: DecodeStream) -> None:
        """Append a commit's tokens to the log, and only then acknowledge and send them."""
        response, metrics = self._opened.response, self._resources.metrics
        part = response.add_commit(self._samples.for_client(commit))
        assert self._slot is not None
        self._slot.spend(output=len(part.tokens))
        append_began = time.monotonic()
        await token_log.append(
            part.tokens,
            response.digest,
            logprobs=part.logprobs,
            plan=self.plan,
            verifier=stream.worker.worker_id,
            origin=stream.worker.origin,
            drafters=self._drafters.drafter_ids,
        )
        self._samples.add(token_log.tokens, len(part.tokens), commit)
        metrics.append.record(time.monotonic() - append_began)
        metrics.tokens[self._opened.model.name] += len(part.tokens)
        metrics.observe_step(self._drafters.drafter_ids, commit.report, commit.contributions)
        self._outbox.put(part)
        stream.acknowledge(self._outbox.limit)
        self._client_watch.start()
        if self._standby is not None:
            self._standby.follow(token_log.tokens, stream.worker)

    def _record_status(self, report: StepReport, statuses: StepStatuses) -> None:
        """Record whether the step verified drafts, and if not, why."""
        status = statuses.of(report, self._drafters.obstacle)
        self._opened.response.usage.speculation.observe(status)
        self._resources.metrics.speculation[self._opened.model.name, status.reason.value] += 1

    def _wants_drafters(self, resting: bool) -> bool:
        """Return whether the generation should have drafters. `resting`: the verifier does without them now."""
        now = time.monotonic()
        if not resting:
            self._wanted_at = now
        return self.plan.depth > 0 and now - self._wanted_at < RELEASE_S

    def _change_plan(self, plan: Plan, stream: DecodeStream) -> None:
        """Follow another plan."""
        self.plan = plan
        self._resources.metrics.changes += 1
        if (span := recording_span()) is not None:
            span.add_event("plan", plan_attributes(plan))
        stream.plan(plan)

    def _assign_drafters(self, token_log: TokenLog, stream: DecodeStream) -> DrafterSet:
        resources, record, contract = self._resources, self._opened.record, self._opened.turn.contract
        wanted = resources.config.drafters_per_session if self._wanted and not stream.worker.treeless else 0
        single = rule_of(contract).child_sampling is ChildSampling.SAMPLED  # several drafters' draws have no one q
        assignment = DraftAssignment(
            session_id=record.session_id,
            tenant=record.tenant,
            epoch=token_log.epoch,
            upstream=stream.worker,
            tokenizer_digest=self._opened.model.digest,
            greedy=contract.greedy,
            single=single,
            previous=token_log.record.drafters,
        )
        wanted = min(wanted, 1) if single else wanted
        tiers, signer = contract.own_or_shared(resources.tiers), resources.ticket_signer
        drafters = DrafterSet(resources.worker_pool, resources.background, assignment, wanted, tiers, signer)
        self._alone = drafters.estimates
        return drafters
