"""Low-rank adapters in a cluster: the text of PEFT, with drafters and without, whoever else has another one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

import outrider
from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, VerifierConfig
from outrider.engine.adapters.low_rank import CONFIG
from outrider.errors import Conflict, InvalidRequest, NotFound
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import described
from tests.engine.small_adapters import load_peft, make_adapter, quiet
from tests.engine.small_checkpoints import make_checkpoint

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TARGET = MODELS / "target"
TOKENS = 48
TERMS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "timeout": 60}


@dataclass(frozen=True)
class Adapted:
    cluster: LocalCluster
    client: outrider.AsyncClient
    folder: Path  # of the verifiers' adapters

    async def text(self, model: str, prompt: str, **terms: Any) -> list[int]:
        return list((await self.client.generate(prompt, model=model, **TERMS | terms)).token_ids)


def config(folder: Path, **router: Any) -> ClusterConfig:
    verifier = VerifierConfig(model=TARGET, dtype="float32", slots=8, adapters=folder, max_adapters=1)
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, overlap=True, **router),
        verifier=[verifier, verifier],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32")],
        gateway=GatewayConfig(listen="127.0.0.1:0"),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of all linears, which change the target's text but not beyond recognition."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        make_adapter(TARGET, folder / name, seed=seed, deviation=0.1)
    return folder


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def adapted(made: Path) -> AsyncIterator[Adapted]:
    async with (
        LocalCluster(config(made, adapter_loaders=("*",)), forward=lambda name, line: print(name, line)) as cluster,
        outrider.AsyncClient(cluster.router_address) as client,
    ):
        for name in "ab":
            await client.load_adapter(name, name)
        yield Adapted(cluster, client, made)


@pytest.mark.parametrize("name", ["a", "b"])
async def test_greedy_text_is_that_of_peft(
    adapted: Adapted, prompts: list[str], tokenizer: Tokenizer, name: str
) -> None:
    peft = load_peft(TARGET, adapted.folder / name)
    ids = torch.tensor([tokenizer.encode(prompts[0]).ids])
    with quiet(), torch.no_grad():
        found = peft.generate(
            input_ids=ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
    expected = found[0, ids.shape[1] :].tolist()
    assert expected != await adapted.text("target", prompts[0], temperature=0)
    for speculation in ("off", "fixed"):
        assert await adapted.text(name, prompts[0], temperature=0, speculation=speculation) == expected
        assert await adapted.text(f"target:{name}", prompts[0], temperature=0, speculation=speculation) == expected


async def test_sessions_with_other_adapters_change_nothing(adapted: Adapted, prompts: list[str]) -> None:
    """Twelve at once, at two verifiers that keep but one adapter each, drafted for: what each says alone."""
    models = [("target", "a", "b")[number % 3] for number in range(12)]
    alone = [
        await adapted.text(model, prompts[number % 2], seed=number, speculation="off")
        for number, model in enumerate(models)
    ]
    together = await asyncio.gather(
        *(
            adapted.text(model, prompts[number % 2], seed=number, speculation="fixed")
            for number, model in enumerate(models)
        )
    )
    assert together == alone
    assert len({tuple(text) for text in alone}) == len(alone)


async def test_a_session_keeps_its_adapter(adapted: Adapted, prompts: list[str]) -> None:
    first = await adapted.client.generate(prompts[0], model="a", temperature=0, **TERMS)
    second = await adapted.client.generate(" and", session=first.session_id, temperature=0, **TERMS)
    assert second.cached_tokens > 0
    whole = prompts[0] + first.text + " and"
    assert second.text == (await adapted.client.generate(whole, model="a", temperature=0, **TERMS)).text
    for other in ("b", "target"):
        with pytest.raises(InvalidRequest, match="another adapter"):
            await adapted.client.generate(" more", session=first.session_id, model=other, **TERMS)


async def test_equal_prompts_share_no_kv_with_those_of_another_adapter(adapted: Adapted) -> None:
    prompt = "def shared(prefix):\n" * 30
    cached = [
        (await adapted.client.generate(prompt, model=model, **TERMS)).cached_tokens
        for model in ("a", "b", "target", "a", "a")
    ]
    assert cached[:3] == [0, 0, 0]
    assert max(cached[3:]) > 100  # of three sessions with adapter a, two were at one of the two verifiers


async def test_a_verifier_that_is_killed_changes_nothing(made: Path, prompts: list[str]) -> None:
    async with (
        LocalCluster(config(made, adapter_loaders=("*",), standby=True)) as cluster,
        outrider.AsyncClient(cluster.router_address) as client,
    ):
        await client.load_adapter("a", "a")
        terms = TERMS | {"max_tokens": 200, "temperature": 0, "model": "a"}
        expected = await client.generate(prompts[0], **terms)
        stream = client.stream(prompts[0], **terms)
        chunks = aiter(stream)
        await anext(chunks)
        serving = (await client.get_session(stream.session_id)).verifier
        verifiers = [it for it in cluster.processes.values() if it.role == "verifier"]
        (process,) = [it for it in verifiers if (await described(it.address)).worker_id == serving]
        os.kill(process.pid, signal.SIGKILL)
        async for _ in chunks:
            pass
        assert stream.result.token_ids == expected.token_ids


async def test_an_adapter_in_use_may_be_unloaded(adapted: Adapted, prompts: list[str]) -> None:
    expected = await adapted.text("a", prompts[1], temperature=0, max_tokens=150)
    await adapted.client.load_adapter("short-lived", "a")
    stream = adapted.client.stream(prompts[1], model="short-lived", temperature=0, **TERMS | {"max_tokens": 150})
    chunks = aiter(stream)
    await anext(chunks)
    await adapted.client.unload_adapter("short-lived")
    with pytest.raises(NotFound, match="short-lived"):
        await adapted.text("short-lived", prompts[0])
    with pytest.raises(NotFound, match="short-lived"):
        await adapted.client.unload_adapter("short-lived")
    async for _ in chunks:
        pass
    assert list(stream.result.token_ids) == expected


async def test_another_version_of_the_files_is_another_adapter(adapted: Adapted, prompts: list[str]) -> None:
    folder = shutil.copytree(adapted.folder / "a", adapted.folder / "changing")
    await adapted.client.load_adapter("changing", "changing")
    session = (await adapted.client.generate(prompts[0], model="changing", **TERMS)).session_id
    before = await adapted.text("changing", prompts[0], temperature=0)
    shutil.rmtree(folder)
    shutil.copytree(adapted.folder / "b", folder)
    assert await adapted.text("changing", prompts[0], temperature=0) == before  # it is in memory
    await adapted.client.load_adapter("b", "b")  # takes its place there, on both verifiers
    for _ in range(2):
        with pytest.raises(Conflict, match="has changed"):
            await adapted.client.generate(" more", session=session, **TERMS)
    await adapted.client.load_adapter("changing", "changing")
    after = await adapted.text("changing", prompts[0], temperature=0)
    assert after == await adapted.text("b", prompts[0], temperature=0) != before
    with pytest.raises(InvalidRequest, match="another version"):
        await adapted.client.generate(" more", session=session, model="changing", **TERMS)


@pytest.mark.parametrize(
    ("name", "folder", "error", "match"),
    [
        ("c", "missing", NotFound, "no such folder"),
        ("c", "../adapters", NotFound, "no such folder"),
        ("c", ".", NotFound, "no such folder"),
        ("c", "/etc", NotFound, "no such folder"),
        ("c", "a\0", NotFound, "no such folder"),
        ("c", "x" * 4000, NotFound, "no such folder"),
        ("c", "broken", InvalidRequest, "DoRA"),
        ("c", "foreign", InvalidRequest, "lora_A"),
        ("", "a", InvalidRequest, "name"),
        ("a b", "a", InvalidRequest, "name"),
        ("target", "a", InvalidRequest, "name of a model"),
    ],
)
async def test_an_invalid_adapter_is_refused(
    adapted: Adapted, tmp_path: Path, name: str, folder: str, error: type[Exception], match: str
) -> None:
    if folder == "broken" and not (broken := adapted.folder / folder).exists():
        shutil.copytree(adapted.folder / "a", broken)
        terms = json.loads((broken / CONFIG).read_text(encoding="utf-8"))
        (broken / CONFIG).write_text(json.dumps(terms | {"use_dora": True}), encoding="utf-8")
    if folder == "foreign" and not (adapted.folder / folder).exists():
        make_adapter(make_checkpoint(tmp_path / "other"), adapted.folder / folder)
    with pytest.raises(error, match=match):
        await adapted.client.load_adapter(name, folder)
    assert [
        it.name for it in (await adapted.client.models())[0].adapters if it.name not in ("a", "b", "changing")
    ] == []


async def test_the_command_loads_lists_and_unloads(adapted: Adapted) -> None:
    async def command(*arguments: str) -> tuple[int | None, str]:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.cli", "adapters", *arguments),
            *("--address", adapted.cluster.router_address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await child.communicate()
        return child.returncode, printed.decode()

    status, line = await command("load", "typed", "b", "--model", "target")
    assert (status, line.startswith("typed  of target  folder b  rank 4  ")) == (0, True)
    status, listed = await command("list")
    assert (status, line in listed) == (0, True)
    assert await command("unload", "typed") == (0, "unloaded typed\n")
    status, problem = await command("unload", "typed")
    assert status == 2
    assert problem.startswith("outrider: ")
    assert "typed" in problem


async def test_the_gateway_loads_lists_and_unloads(adapted: Adapted, prompts: list[str]) -> None:
    base = f"http://{adapted.cluster.processes['gateway'].address}/v1"
    async with httpx.AsyncClient() as http, openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as theirs:
        loaded = await http.post(f"{base}/load_lora_adapter", json={"lora_name": "web", "lora_path": "a"})
        assert (loaded.status_code, loaded.text) == (200, "Success: adapter 'web' of target is loaded.")
        listed = {it.id: it.model_dump() for it in (await theirs.models.list()).data}
        assert (listed["web"]["parent"], listed["web"]["root"]) == ("target", "a")
        assert (await theirs.models.retrieve("web")).id == "web"
        made = await theirs.completions.create(model="web", prompt=prompts[0], temperature=0, max_tokens=TOKENS)
        expected = await adapted.client.generate(prompts[0], model="a", temperature=0, max_tokens=TOKENS, timeout=60)
        assert (made.choices[0].text, made.model) == (expected.text, "web")
        absolute = str(adapted.folder / "b")
        again = await http.post(f"{base}/load_lora_adapter", json={"lora_name": "web", "lora_path": absolute})
        assert again.status_code == 200
        assert (await http.post(f"{base}/unload_lora_adapter", json={"lora_name": "web"})).status_code == 200
        assert (await http.post(f"{base}/unload_lora_adapter", json={"lora_name": "web"})).status_code == 404
        with pytest.raises(openai.NotFoundError):
            await theirs.completions.create(model="web", prompt="x")
