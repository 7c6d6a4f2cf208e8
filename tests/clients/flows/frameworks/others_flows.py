"""dspy, smolagents and llm."""

import json
import subprocess
import sys
from pathlib import Path

import dspy
from conftest import MODEL, QUESTION, TOKENS
from smolagents import OpenAIServerModel


def test_dspy_completes(same) -> None:
    def ask(url: str) -> str:
        model = dspy.LM(
            f"openai/{MODEL}", api_base=f"{url}/v1", api_key="unused", temperature=0, max_tokens=TOKENS, cache=False
        )
        return model(QUESTION)[0]

    assert same(ask)


def test_smolagents_ask_with_their_stop_strings(same) -> None:
    def ask(url: str) -> str:
        model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key="unused", temperature=0, max_tokens=TOKENS)
        asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        return model.generate(asked, stop_sequences=["Observation:"]).content

    assert same(ask)


def test_llm_answers_in_a_terminal(same, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def ask(url: str) -> str:
        (tmp_path / "extra-openai-models.yaml").write_text(
            json.dumps([{"model_id": "ours", "model_name": MODEL, "api_base": f"{url}/v1"}])
        )
        program = Path(sys.executable).parent / "llm"
        asked = [program, "-m", "ours", QUESTION, "-o", "temperature", "0", "-o", "max_tokens", str(TOKENS)]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout

    assert same(ask).strip()
