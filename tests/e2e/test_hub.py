"""A cluster whose models are named as on the hub answers as one of the folders does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

import outrider
from outrider.cli.main import app
from outrider.client._wire import Options
from outrider.config import load_cluster
from outrider.errors import ConfigError
from outrider.fleet.cluster import LocalCluster
from tests.fake_hub import cached

MODELS = Path(__file__).parents[2] / "models"
FILE = """
[router]
listen = "127.0.0.1:0"
models = {{ target = "{target}" }}
[[verifier]]
model = "{target}"
dtype = "float32"
[[drafter]]
model = "{drafter}"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for processes that are started, with the reference target as org/target, revision v1, and a template."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    snapshot = cached(cache, "org/target", MODELS / "target", revision="v1")
    (snapshot / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    return cache


def written(folder: Path, target: str, drafter: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(FILE.format(target=target, drafter=drafter))
    return file


async def answers(file: Path) -> list[str]:
    async with (
        LocalCluster(load_cluster(file)) as cluster,
        outrider.AsyncClient(cluster.router_address) as client,
    ):
        texts = [
            client.generate("def add(a, b):", temperature=heat, seed=5, max_tokens=48, ignore_eos=True, timeout=60)
            for heat in (0.0, 0.8)
        ]
        return [result.text for result in await asyncio.gather(*texts)]


async def test_a_cluster_of_names_on_the_hub_answers_as_one_of_folders_does(tmp_path: Path, cache: Path) -> None:
    cached(cache, "org/drafter", MODELS / "drafter")
    named = await answers(written(tmp_path, "org/target@v1", "org/drafter"))
    assert named == await answers(written(tmp_path, str(MODELS / "target"), str(MODELS / "drafter")))


async def test_messages_are_answered_like_their_rendered_prompt(tmp_path: Path, cache: Path) -> None:
    cached(cache, "org/drafter", MODELS / "drafter")
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    prompt = tokenizer.encode("<|endoftext|>def add(a, b):", add_special_tokens=False).ids
    how: Options = {"temperature": 0.8, "seed": 3, "max_tokens": 32, "ignore_eos": True}
    async with (
        LocalCluster(load_cluster(written(tmp_path, "org/target@v1", "org/drafter"))) as cluster,
        outrider.AsyncClient(cluster.router_address) as client,
    ):
        messages = [{"role": "user", "content": "def add("}, {"role": "user", "content": "a, b):"}]
        chatted = await client.generate(messages=messages, timeout=60, **how)
        asked = await client.generate(prompt, timeout=60, **how)
    assert (chatted.text, chatted.usage.prompt_tokens) == (asked.text, len(prompt))


async def test_a_worker_whose_model_is_not_cached_is_named_with_the_remedy(tmp_path: Path, cache: Path) -> None:
    cached(cache, "org/drafter", MODELS / "drafter", files="*.json")
    with pytest.raises(ConfigError, match=r"^drafter-0: org/drafter: model\.safetensors is missing"):
        await answers(written(tmp_path, "org/target@v1", "org/drafter"))


def test_commands_take_names_on_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    described = CliRunner().invoke(app, ["describe", "org/target@v1"])
    assert (described.exit_code, "tokenizer digest" in described.output) == (0, True)
    padded = CliRunner().invoke(app, ["pad", "org/target@v1", str(tmp_path / "padded"), "--parameters", "9M"])
    assert padded.exit_code == 0
    assert (tmp_path / "padded" / "model.safetensors").is_file()
    verified = CliRunner().invoke(app, ["verify", "--target", "org/target@v2", "--count", "1"])
    assert verified.exit_code == 2
    assert "org/target@v2: no such folder here, not in the Hugging Face cache" in verified.stderr
