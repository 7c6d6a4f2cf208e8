"""litellm: its SDK, and its proxy in front of a gateway."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import litellm
from conftest import MODEL, QUESTION, TOKENS, URLS

ASKED = [{"role": "user", "content": QUESTION}]


def test_the_sdk_answers_and_streams(same) -> None:
    def ask(url: str) -> str:
        asked = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "unused", "messages": ASKED}
        asked |= {"temperature": 0, "max_tokens": TOKENS}
        whole = litellm.completion(**asked).choices[0].message.content
        assert (
            "".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)) == whole
        )
        return whole

    assert same(ask)


def test_the_sdk_speaks_messages(same) -> None:
    def ask(url: str) -> str:
        asked = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "unused", "messages": ASKED}
        return litellm.completion(**asked, temperature=0, max_tokens=TOKENS).choices[0].message.content

    assert same(ask)


def test_the_proxy_passes_chats_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{URLS[0]}/v1", "api_key": "unused"}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "ours", "litellm_params": parameters}]}))
    program = Path(sys.executable).parent / "litellm"
    environment = {**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    command = [program, "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=environment) as proxy:
        try:
            body = json.dumps({"model": "ours", "messages": ASKED, "max_tokens": TOKENS}).encode()
            headers = {"content-type": "application/json", "authorization": "Bearer unused"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
            give_up = time.monotonic() + 90
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        assert json.load(answer)["usage"]["completion_tokens"] == TOKENS
                        break
                except (urllib.error.URLError, ConnectionError):
                    assert time.monotonic() < give_up
                    assert proxy.poll() is None
                    time.sleep(0.5)
        finally:
            proxy.terminate()
