"""Opens a generation's stream on the first verifier that takes it."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from outrider.config import RouterConfig
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.decoding import DecodeStart
from outrider.errors import InternalError, OutriderError, Overloaded, Stalled, Unavailable
from outrider.rpc.tracing import client_span
from router.counters.request_metrics import plan_attributes
from router.requests.requests import check_fits
from router.scheduling.workers import matching_verifiers
from router.sessions.context import DecodeResources
from router.sessions.takeover import OpenedGeneration
from router.sessions.token_log import TokenLog
from router.sessions.verifier_client import DecodeStream

MAX_STALLS = 2  # after which a generation moves to another verifier


@asynccontextmanager
async def open_stream(
    resources: DecodeResources,
    opened: OpenedGeneration,
    token_log: TokenLog,
    *,
    contract: Contract,
    plan: Plan,
    kv_holder: str,
    on_attempt: Callable[[DecodeStream], None],
    stalled: list[str],
) -> AsyncIterator[DecodeStream]:
    """Yield a stream on the first verifier that has a KV slot: `kv_holder`, which has the session's KV, else the least
    loaded. `contract` is the verifier's; `on_attempt` is called with each stream before it is opened; `stalled`: worker
    ids of verifiers that stood still while they had the generation.

    A text that has begun goes on only at verifiers of its origin. Raises the refusal of one verifier if all refuse:
    Overloaded if one of them is full, else Unavailable. Raises InternalError once more than MAX_STALLS have stood
    still: what stops one verifier after the other is not sent on.
    """
    worker_pool = resources.worker_pool
    verifiers = await matching_verifiers(worker_pool, opened.model, token_log.origin)
    workers = check_fits(token_log.tokens, opened.turn.contract, verifiers, opened.response.start)
    refusal: OutriderError | None = None
    for worker in worker_pool.rank_verifiers(
        workers, kv_holder, token_log.tokens, contract.kv_scope(opened.record.tenant)
    ):
        start = _decode_start(resources.config, opened, token_log, contract, plan)
        stream = DecodeStream(worker, resources.verifier_links.to(worker), start)
        worker_pool.add_session(worker)
        began = time.monotonic()
        try:
            with client_span("outrider.v1.Verifier/Decode") as span:
                span.add_event("plan", plan_attributes(plan))
                on_attempt(stream)
                await stream.open()
                yield stream
                return
        except (Unavailable, Overloaded) as error:
            worker_pool.on_failure(worker, error)
            if isinstance(error, Stalled) and stream.opened:
                stalled.append(worker.worker_id)
                if len(stalled) > MAX_STALLS:
                    raise InternalError(
                        f"verifiers {', '.join(stalled)} stood still one after the other while they decoded this"
                        " answer; it is not moved again: look at their logs before you repeat the request"
                    ) from None
            if stream.opened:
                raise
            if not isinstance(refusal, Overloaded):  # a full verifier will have room later
                refusal = error
        finally:
            stream.cancel()
            worker_pool.remove_session(worker, time.monotonic() - began if stream.opened else 0.0)
    assert refusal is not None
    raise refusal


def _decode_start(
    config: RouterConfig, opened: OpenedGeneration, token_log: TokenLog, contract: Contract, plan: Plan
) -> DecodeStart:
    record = opened.record
    return DecodeStart(
        session_id=record.session_id,
        tenant=record.tenant,
        epoch=token_log.epoch,
        model=record.model,
        tokenizer_digest=record.tokenizer_digest,
        tokens=tuple(token_log.tokens),
        digest=opened.response.digest,
        answer_position=opened.turn.answer_position,
        contract=contract,
        plan=plan,
        window=config.window,
        lease_s=config.lease_s,
        timeout_s=None if math.isinf(opened.left_s) else max(0.0, opened.left_s),
        scored=0 if contract.prompt_logprobs is None else max(1, opened.response.scored),
    )
