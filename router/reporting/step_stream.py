"""A stream of a session's steps for its owner, wherever the session decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc.aio

from outrider.errors import NotFound, Unavailable
from outrider.rpc.status import from_rpc_error
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from router.api.requests import find_model
from router.sessions.session_open import RouterContext, open_record

RETRY_S = 0.1  # between two looks for the verifier that decodes the session


async def session_steps(
    router: RouterContext, tenant: str, session_id: str
) -> AsyncGenerator[types_pb2.StepTree, None]:
    """Yield a session's steps from now on, generation after generation, until it is closed. Raises NotFound."""
    record = await open_record(router.sessions, tenant, session_id)
    token_text = find_model(record.model, router.models).token_text
    while True:
        for worker in router.worker_pool.listed:
            if worker.worker_id != record.verifier:
                continue
            call = VerifierStub(router.worker_pool.channel(worker)).Watch(
                verifier_pb2.WatchRequest(session_id=session_id)
            )
            try:
                async for step in call:
                    if step is None:  # gRPC gives None for bytes that do not parse
                        raise Unavailable(f"verifier {worker.worker_id} has sent bytes that are no message")
                    step.texts.extend(map(token_text, step.tokens))
                    step.committed_texts.extend(map(token_text, step.committed))
                    yield step
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error)
                if not isinstance(known, NotFound | Unavailable):
                    raise known from None
            finally:
                call.cancel()
        await asyncio.sleep(RETRY_S)
        record = await open_record(router.sessions, tenant, session_id)
