"""A body takes bounded memory and a bounded time of the gateway's event loop, whatever JSON it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from outrider.client import AsyncClient
from outrider.core.json_bounds import MOST
from outrider.gateway.multiplex import streams
from tests.gateway.conftest import GatewayHarness
from tests.gateway.process import GatewayProcess, gateway_process
from tests.loops import stalls
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, running_router

MIB = 2**20
CALLERS = 12
PEAK = 128 * MIB  # beside what the idle gateway holds, as docs/gateway.md has it
PARTS = '{"model":"target","messages":[{"role":"user","content":['
MESSAGES = '"model":"target","messages":[{"role":"user","content":"x"}]'
PART, CALL = '{"type":"text","text":""}', '{"id":"","type":"function","function":{"name":"","arguments":""}}'
DEEP = '{"a":' * 150 + "1" + "}" * 150


def filled(head: str, unit: str, tail: str, most: int = 4 * MIB, count: int | None = None) -> bytes:
    """A body of as many units as fit into the most bytes, or of `count`."""
    room = (most - len(head) - len(tail)) // (len(unit) + 1)
    return (head + ",".join([unit] * (count or room)) + tail).encode()


def tool(parameters: str) -> str:
    return f'{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}'


REFUSED = {  # the body, and the field that the error names, by what is wrong
    "tools": (filled(f'{{{MESSAGES},"tools":[', tool(DEEP), "]}"), "tools"),
    "wide-tools": (
        filled(f'{{{MESSAGES},"tools":[{{"type":"function","function":{{"name":"f","x":[', "{}", "]}}]}"),
        "tools",
    ),
    "parts": (filled(PARTS, PART, "]}]}"), "messages"),
    "strings": (filled('{"model":"target","prompt":[', '""', "]}"), "prompt"),
    "metadata": (filled(f'{{{MESSAGES},"metadata":{{', '"":0', "}}"), "metadata"),
    "ids": (filled('{"model":"target","prompt":[', "1", "]}"), "prompt"),
    "arguments": (
        filled(f'{{{MESSAGES},"chat_template_kwargs":{{"x":', "[" * 4 * 1000, "", count=1),
        "chat_template_kwargs",
    ),
}
PARSED = {  # the worst that is parsed
    "ids": filled('{"model":"target","prompt":[', "1234567", "]}"),
    "one-digit-ids": filled('{"model":"target","prompt":[', "1", "]}", count=MOST.values - 8),
    "fractions": filled('{"model":"target","prompt":[', "1.5", "]}", count=MOST.values - 8),
    "lists-of-ids": filled('{"model":"target","prompt":[', "[" + "1," * 40 + "1]", "]}", count=MOST.values // 43 - 8),
    "parts": filled(PARTS, PART, "]}]}", 4 * MIB, MOST.containers - 4),
    "strings": filled('{"model":"target","prompt":[', f'"{"x" * 60}"', "]}", 4 * MIB, MOST.strings - 3),
    "calls": filled(
        '{"model":"target","messages":[',
        '{"role":"assistant","tool_calls":[' + ",".join([CALL] * 128) + "]}",
        "]}",
        count=MOST.containers // (128 * 3 + 4) - 1,
    ),
    "tools": filled(
        f'{{{MESSAGES},"tools":[', tool('{"x":[' + ",".join(['{"type":"a"}'] * 120) + "]}"), "]}", count=127
    ),
    "text": filled('{"model":"target","prompt":"', "\\n" * (2 * MIB - 100), '"}', count=1),
}  # fmt: skip

SENT = '{"model":"target","max_tokens":1,"messages":['
USED, RESULT = (
    '{"type":"tool_use","id":"","name":"","input":{}}',
    '{"type":"tool_result","tool_use_id":"","content":[]}',
)
GIVEN = '{"model":"target","input":['
MADE = '{"type":"function_call","call_id":"","name":"","arguments":""}'
LEAF = '{"x":[' + ",".join(['{"type":"a"}'] * 120) + "]}"
OF_OTHER_APIS = {  # the worst that is parsed, by path
    "/v1/messages": (
        filled(f'{SENT}{{"role":"user","content":[', PART, "]}]}", count=MOST.containers - 4),
        filled(f'{SENT}{{"role":"user","content":[', RESULT, "]}]}", count=MOST.containers // 2 - 4),
        filled(f'{SENT}{{"role":"assistant","content":[', USED, ']},{"role":"user","content":"x"}]}', count=5000),
        filled(
            f'{SENT}{{"role":"user","content":"x"}}],"tools":[',
            f'{{"name":"f","input_schema":{LEAF}}}',
            "]}",
            count=127,
        ),
    ),
    "/v1/responses": (
        filled(
            f'{GIVEN}{{"role":"user","content":[', '{"type":"input_text","text":""}', "]}]}", count=MOST.containers - 4
        ),
        filled(GIVEN, MADE, "]}", count=4096),
        filled(f'{GIVEN}{{"type":"reasoning","encrypted_content":"outrider:', "A" * (3 * MIB), '"}]}', count=1),
        filled(
            '{"model":"target","input":"x","stream":true,"tools":[',
            f'{{"type":"function","name":"f","parameters":{LEAF}}}',
            "]}",
            count=127,
        ),
    ),
}


@asynccontextmanager
async def served(redis_url: str) -> AsyncIterator[GatewayProcess]:
    async with (
        running_router(redis_url) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
        gateway_process(rig.address) as gateway,
    ):
        assert (await post(gateway, b'{"model":"target","prompt":"x","max_tokens":1}')).status_code == 200
        yield gateway


async def post(gateway: GatewayProcess, body: bytes, path: str = "") -> httpx.Response:
    path = path or ("/v1/chat/completions" if b'"messages"' in body else "/v1/completions")
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as web:
        return await web.post(path, content=body, headers=headers)


async def test_a_body_with_too_many_or_too_deep_parts_is_refused_before_it_is_parsed(redis_url: str) -> None:
    async with served(redis_url) as gateway:
        held = gateway.forget_peak()
        for name, (body, field) in REFUSED.items():
            answer = await post(gateway, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field), name
            assert "has more than" in error["message"], name
        assert gateway.peak_bytes - held < 48 * MIB  # a few copies of the bytes, and what uvicorn has of them
        assert await stalls([gateway.page]) == {gateway.page: 0}


async def test_the_worst_bodies_of_twelve_callers_keep_within_documented_memory(
    redis_url: str,
) -> None:
    async with served(redis_url) as gateway:
        held = gateway.forget_peak()
        for name, body in PARSED.items():
            answers = await asyncio.gather(*(post(gateway, body) for _ in range(CALLERS)))
            assert {answer.status_code for answer in answers} <= {400, 429}, name
            assert not any("has more than" in answer.text for answer in answers), name  # it was parsed
        assert gateway.peak_bytes - held < PEAK
        assert await stalls([gateway.page]) == {gateway.page: 0}


@pytest.mark.parametrize("path", OF_OTHER_APIS)
async def test_the_worst_bodies_of_other_apis_keep_within_documented_memory(redis_url: str, path: str) -> None:
    async with served(redis_url) as gateway:
        held = gateway.forget_peak()
        for place, body in enumerate(OF_OTHER_APIS[path]):
            answers = await asyncio.gather(*(post(gateway, body, path) for _ in range(CALLERS)))
            assert {answer.status_code for answer in answers} <= {400, 429}, place
            assert not any("has more than" in answer.text for answer in answers), place  # it was parsed
        assert gateway.peak_bytes - held < PEAK
        assert await stalls([gateway.page]) == {gateway.page: 0}


LEVELS = 20_000
SCHEMA = "[" * LEVELS + "]" * LEVELS


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (f'"guided_json":{SCHEMA}', "guided_json"),
        (f'"guided_json":"{SCHEMA}"', "guided_json"),
        (f'"guided_json":{{"a":{DEEP}}}', "guided_json"),
        (f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{DEEP}}}}}', "response_format"),
        (f'"tools":[{tool(DEEP)}]', "tools"),
        (f'"chat_template_kwargs":{DEEP}', "chat_template_kwargs"),
        (f'"metadata":{DEEP}', "metadata"),
    ],
)
async def test_json_that_is_too_deep_is_an_error_that_names_its_field(
    harness: GatewayHarness, extra: str, field: str
) -> None:
    body = f"{{{MESSAGES},{extra}}}".encode()
    async with httpx.AsyncClient(base_url=harness.url) as web:
        answer = await web.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert error["message"] == f"{field}: has more than 64 levels of lists and objects"


async def test_a_schema_of_honest_depth_is_passed_on(harness: GatewayHarness) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(15):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    answer = await harness.client.completions.create(
        model="target", prompt="x", max_tokens=1, extra_body={"guided_json": schema}
    )
    assert answer.choices[0].finish_reason == "length"


async def test_choices_of_a_request_share_one_request_and_have_keys_of_their_own(harness: GatewayHarness) -> None:
    client = AsyncClient(harness.rig.address)
    try:
        ((first, *others), (second, *_)) = await streams(client, ["a", "b"], 3, {"seed": 7, "max_tokens": 1}, 10)
        requests = [each._answer.request for each in (first, *others, second)]
        assert [it.sampling.choice for it in requests] == [0, 1, 2, 0]
        assert [it.text for it in requests] == ["a", "a", "a", "b"]
        assert len({it.idempotency_key for it in requests}) == 4
        assert {it.sampling.seed for it in requests} == {7}
    finally:
        await client.close()
