"""Training samples for drafters, collected while responses are generated, for tenants that allow it. No generation
waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from outrider.core.sampling.logprobs import alternatives, narrowed, stride
from outrider.core.session.contract import Contract
from outrider.core.session.decoding import ReceivedCommit
from outrider.core.session.training_samples import MAX_CHOSEN, TOP, TrainingSample, sample_of
from outrider.errors import InternalError, OutriderError
from outrider.store.redis.client import Client
from outrider.store.training_samples import TrainingSampleStore
from outrider.telemetry.metrics import register_metric
from router.requests.served_models import ServedModel

ALL_TENANTS = "*"
MAX_WAITING = 64  # samples on their way to Redis; further ones are dropped

log = logging.getLogger(__name__)


class SampleCollector:
    """Collects the training samples of one generation. This one collects nothing."""

    def verifier_contract(self, requested: Contract) -> Contract:
        """Return the contract for the verifier, given the one that the caller requested."""
        return requested

    def for_client(self, commit: ReceivedCommit) -> ReceivedCommit:
        """Return a commit as the caller's contract requires it. Raises InternalError for a commit that does not match
        the verifier's contract."""
        return commit

    def add(self, tokens: Sequence[int], count: int, commit: ReceivedCommit) -> None:
        """Collect durable tokens: the log is `tokens` now, and its last `count` tokens are the first of that commit."""

    def flush(self) -> None:
        """Write what was collected; the generation has ended."""


class SampleWriter:
    """Writes a router's samples to Redis while `run` runs."""

    def __init__(self, redis: Client, tenants: Collection[str]) -> None:
        """`tenants`: tenants whose responses drafters may be trained on; ALL_TENANTS among them: all."""
        self.written = self.dropped = 0  # samples
        self._redis = redis
        self._tenants = frozenset(tenants)
        self._waiting: deque[tuple[ServedModel, TrainingSample]] = deque()
        self._offered = asyncio.Event()
        register_metric("outrider.examples.written", lambda: self.written)
        register_metric("outrider.examples.dropped", lambda: self.dropped)

    def collector(self, tenant: str, model: ServedModel, contract: Contract) -> SampleCollector:
        """Return the sample collector of a generation of that tenant, which collects nothing unless the tenant allows
        it, and the contract is representative: drafters draft for all tenants."""
        if self._tenants.isdisjoint((tenant, ALL_TENANTS)) or not contract.representative:
            return SampleCollector()
        return _RowCollector(self, model, contract.logprobs, greedy=contract.greedy)

    def offer(self, model: ServedModel, sample: TrainingSample) -> None:
        """Queue a sample to be written; drop it if Redis does not keep up."""
        if len(self._waiting) == MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((model, sample))
        self._offered.set()

    async def run(self) -> None:
        """Write queued samples until cancelled. Samples that Redis does not take are dropped."""
        failing = False
        while True:
            await self._offered.wait()
            self._offered.clear()
            by_model: dict[str, list[TrainingSample]] = {}
            models = {model.name: model for model, _ in self._waiting}
            while self._waiting:
                model, sample = self._waiting.popleft()
                by_model.setdefault(model.name, []).append(sample)
            for name, samples in by_model.items():
                try:
                    await TrainingSampleStore(self._redis, name, models[name].digest).add(samples)
                    self.written += len(samples)
                    failing = False
                except OutriderError as error:
                    self.dropped += len(samples)
                    log.log(logging.DEBUG if failing else logging.WARNING, "training samples are dropped: %s", error)
                    failing = True


class _RowCollector(SampleCollector):
    """Collects rows of a generation until they make a sample."""

    def __init__(self, writer: SampleWriter, model: ServedModel, requested: int | None, *, greedy: bool) -> None:
        self._writer = writer
        self._model = model
        self._requested = requested
        self._greedy = greedy
        self._alternatives = max(requested or 0, TOP)  # alternatives per token that the verifier sends
        self._rows: list[bytes] = []
        self._tokens_held = 0  # tokens in `_rows`
        self._tokens: Sequence[int] = ()  # of the session; those in `_rows` are the last

    def verifier_contract(self, requested: Contract) -> Contract:
        return replace(requested, logprobs=self._alternatives)

    def for_client(self, commit: ReceivedCommit) -> ReceivedCommit:
        if len(commit.logprobs) != len(commit.tokens) * stride(self._alternatives):
            raise InternalError(f"the verifier sent {len(commit.logprobs)} bytes of log-probabilities to learn from")
        return replace(commit, logprobs=narrowed(commit.logprobs, self._alternatives, self._requested))

    def add(self, tokens: Sequence[int], count: int, commit: ReceivedCommit) -> None:
        self._rows.append(commit.logprobs[: count * stride(self._alternatives)])
        self._tokens_held += count
        self._tokens = tokens
        if self._tokens_held >= MAX_CHOSEN:
            self.flush()

    def flush(self) -> None:
        if self._tokens_held:
            ids, logprobs = alternatives(b"".join(self._rows), self._alternatives)
            self._writer.offer(self._model, sample_of(self._tokens, ids, logprobs, greedy=self._greedy))
        self._rows.clear()
        self._tokens_held = 0
