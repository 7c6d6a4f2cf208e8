"""The SDK: a client of a router. It needs grpcio, protobuf and the API of OpenTelemetry, nothing else.

    with outrider.Client("127.0.0.1:7070") as client:
        print(client.generate("def add(a, b):", max_tokens=32).text)

`Client` is for synchronous code, and threads may share it. `AsyncClient` has the same methods for asyncio.
"""

from outrider.client._async import AsyncClient
from outrider.client._connection import ConnectionOptions
from outrider.client._stream import AsyncStream
from outrider.client._sync import Client, Stream
from outrider.client._types import (
    Chunk,
    Generation,
    LogprobRows,
    Model,
    ModelAdapter,
    Session,
    StepNode,
    StepTree,
    TokenizedPrompt,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from outrider.client._wire import Options
from outrider.core.session.contract import FinishReason
from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "ConnectionOptions",
    "FinishReason",
    "Generation",
    "LogprobRows",
    "Model",
    "ModelAdapter",
    "Options",
    "Session",
    "SpeculationReason",
    "SpeculationStatus",
    "StepNode",
    "StepTree",
    "Stream",
    "TokenLogprobs",
    "TokenizedPrompt",
    "ToolCall",
    "Usage",
]
