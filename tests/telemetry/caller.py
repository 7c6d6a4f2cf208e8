"""A program that uses the SDK and OpenTelemetry, as its user's would: one traced answer.

python -m tests.telemetry.caller ROUTER MAX_TOKENS [TIMEOUT]
"""

import asyncio
import sys

from opentelemetry import trace

import outrider
from outrider.errors import OutriderError
from outrider.telemetry.process import exporting_telemetry

PROMPT = "    def winnow_quietly(self, barley"


async def main(router: str, tokens: int, timeout: float | None) -> None:
    with trace.get_tracer("caller").start_as_current_span("question") as span:
        print(f"{span.get_span_context().trace_id:032x}", flush=True)
        async with outrider.AsyncClient(router) as client:
            result = await client.generate(
                PROMPT, max_tokens=tokens, ignore_eos=True, seed=3, temperature=0.7, timeout=timeout
            )
    print(f"{result.usage.steps} {result.usage.verified} {result.usage.accepted} {result.session_id}")
    print(result.text.replace("\n", " "))


if __name__ == "__main__":
    with exporting_telemetry("caller", "caller-1"):
        try:
            asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else None))
        except OutriderError as error:
            print(type(error).__name__)
