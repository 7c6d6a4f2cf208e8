"""A gateway whose model writes what a test wants: reasoning, text and calls, and whose chat template knows them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router import fakes
from tests.router.fakes import FakeVerifier
from tests.router.rig import FOLDER, MODEL

CONTEXT = 2048
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<tool_call>
{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.id }} {{ call.function | tojson }}{% endfor %}{{ m.tool_call_id }}
{% endfor %}{{ enable_thinking }}{{ reasoning_effort }}{% if add_generation_prompt %}<assistant>{% endif %}"""  # noqa: E501 - a template's lines are its text
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
SAID = "<think>Hm, a zone.</think>I look.\n" + CALL


@asynccontextmanager
async def writing(
    redis_url: str, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, *, end: bool = True, **verifying: Any
) -> AsyncIterator[GatewayHarness]:
    """A gateway in front of a verifier that commits `text`, and then the end of text."""
    monkeypatch.setattr(fakes, "CONTEXT", CONTEXT)
    shutil.copytree(FOLDER, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    script = [*MODEL.tokenizer.encode(text, add_special_tokens=False).ids, *(MODEL.eos_ids[:1] if end else ())]
    verifier = FakeVerifier(script, **verifying)
    async with gateway_harness(redis_url, verifier, models={"target": folder / "model"}) as harness:
        yield harness


def prompt_of(harness: GatewayHarness) -> str:
    """The text of the latest prompt, as the verifier got it."""
    start = harness.verifier.starts[-1]
    return MODEL.tokenizer.decode(list(start.tokens), skip_special_tokens=False)
