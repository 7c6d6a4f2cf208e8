"""A session's steps for its owner, wherever it decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc.aio

from outrider.errors import NotFound, Unavailable
from outrider.rpc.status import from_rpc_error
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from router.opening import Cluster, open_record
from router.requests import named

LOOK_S = 0.1  # between two looks for where it decodes


async def watched(cluster: Cluster, tenant: str, session_id: str) -> AsyncGenerator[types_pb2.StepTree, None]:
    """Its steps from now on, generation after generation, until it is closed. Raises NotFound."""
    record = await open_record(cluster.sessions, tenant, session_id)
    spelled = named(record.model, cluster.models).spelled
    while True:
        for worker in cluster.fleet.listed:
            if worker.worker_id != record.verifier:
                continue
            call = VerifierStub(cluster.fleet.channel(worker)).Watch(verifier_pb2.WatchRequest(session_id=session_id))
            try:
                async for step in call:
                    if step is None:  # gRPC's word for bytes that do not parse
                        raise Unavailable(f"verifier {worker.worker_id} has sent bytes that are no message")
                    step.texts.extend(map(spelled, step.tokens))
                    step.committed_texts.extend(map(spelled, step.committed))
                    yield step
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error)
                if not isinstance(known, NotFound | Unavailable):
                    raise known from None
            finally:
                call.cancel()
        await asyncio.sleep(LOOK_S)
        record = await open_record(cluster.sessions, tenant, session_id)
