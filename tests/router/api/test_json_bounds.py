"""JSON in a request is bounded at the router, too, whoever made it: its depth, and how much of it there is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.json_bounds import MOST
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from tests.loops import no_stall
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import FOLDER, MODEL, SCRIPT, drain, running_router

DEEP = "[" * 20_000 + "]" * 20_000
JUST_TOO_DEEP = '{"a":' * MOST.depth + "{}" + "}" * MOST.depth
USER = pb.Message(role="user", content="x")


def tools(parameters: str) -> str:
    return f'[{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}]'


def made(arguments: str) -> pb.Message:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return pb.Message(role="assistant", tool_calls=json.dumps([call]))


def grammar(kind: str, text: str) -> pb.Sampling:
    return pb.Sampling(max_tokens=1, grammar=types_pb2.Grammar(kind=kind, text=text))


CALLS = "messages[1].tool_calls"
WIDE = "[" + "[]," * (MOST.containers // 2) + "[]]"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({"tools": pb.Tools(definitions=tools(DEEP))}, "tools: has more than 64"),
    "tools-just": ({"tools": pb.Tools(definitions=tools(JUST_TOO_DEEP))}, "tools: has more than 64"),
    "forced": ({"tools": pb.Tools(definitions=tools(DEEP), required=True)}, "tools: has more than 64"),
    "calls": (
        {"messages": [pb.Message(role="assistant", tool_calls=DEEP)]},
        "messages[1].tool_calls: has more than 64",
    ),
    "arguments": ({"messages": [made(DEEP)]}, "messages[1].tool_calls: has more than 64"),
    "variables": ({"template_variables": f'{{"x":{"[" * 8000}'}, "template_variables: has more than 64"),
    "schema": ({"sampling": grammar("json_schema", DEEP)}, "grammar.text: has more than 64"),
    "choices": ({"sampling": grammar("choices", DEEP)}, "grammar.text: has more than 64"),
    "together": (
        {"tools": pb.Tools(definitions=tools(f'{{"x":{WIDE}}}')), "messages": [made(f'{{"x":{WIDE}}}')]},
        f"{CALLS}: has more than 16384 lists and objects",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_json_beyond_its_bounds_is_refused_by_name(redis_url: str, tmp_path: Path, name: str) -> None:
    shutil.copytree(FOLDER, tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>{{ tools }}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    fields, problem = REFUSED[name]
    request = pb.GenerateRequest(**{**fields, "messages": [USER, *fields.get("messages", ())]})
    async with (
        running_router(redis_url, models={"target": tmp_path / "chat"}) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
        no_stall(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(rig.stub.Generate(request))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (raised.value.details() or "").startswith(problem)
