"""A drafter goes over to versions of its model while sessions run, and back by itself; the text stays the target's."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.client import AsyncClient, Generation
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.digest import tokenizer_digest
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.fleet.cluster import LocalCluster
from outrider.store.redis.client import connect
from outrider.store.versions import Version, Versions
from tests.e2e.conftest import MODELS
from tests.e2e.tiny_models import VOCABULARY, make_tiny

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 160
DIGEST = tokenizer_digest((MODELS / "target" / "tokenizer.json").read_bytes()).hex()


class Served:
    """A cluster whose one drafter learns, and its log lines."""

    def __init__(self, client: AsyncClient, versions: Versions, lines: list[str], trainer_redis: str) -> None:
        self.trainer_redis = trainer_redis
        self.client = client
        self.versions = versions
        self.lines = lines

    async def publish(self, number: int, folder: Path) -> None:
        digest = weights_digest(folder)
        assert await self.versions.publish(Version(number, str(folder), digest, "target", "", DIGEST))

    async def logged(self, what: str) -> None:
        async with asyncio.timeout(40):
            while not any(what in line for line in self.lines):
                await asyncio.sleep(0.02)

    async def all_of(self, prompts: list[str], **options: object) -> list[Generation]:
        terms = {"seed": 3, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.7, **options}
        return await asyncio.gather(*(self.client.generate(prompt, **terms) for prompt in prompts))


@asynccontextmanager
async def served(models: Path = MODELS) -> AsyncIterator[Served]:
    lines: list[str] = []
    target = models / "target"
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, policy="rounds", depth=4, teaches=("*",)),
        verifier=[VerifierConfig(model=target, dtype="float32")],
        drafter=[DrafterConfig(model=models / "drafter", dtype="float32", learns=True)],
    )
    async with (
        LocalCluster(config, forward=lambda name, line: lines.append(f"{name}: {line}")) as cluster,
        AsyncClient(cluster.router_address) as client,
        aclosing(connect(cluster.redis_url)) as redis,
    ):
        yield Served(client, Versions(redis, "drafter"), lines, cluster.redis_url_of("trainer"))


def spoilt(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The drafter's checkpoint with other weights."""
    shutil.copytree(MODELS / "drafter", folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def at_random(weights: dict[str, torch.Tensor]) -> None:
    for weight in weights.values():
        if weight.dim() > 1:
            weight.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(1))


def accepted(answers: list[Generation]) -> float:
    """The share of verified depths that were accepted: a step that a busy machine left without drafts has none."""
    reached, tried = (
        sum(sum(getattr(answer.usage, by_depth)) for answer in answers)
        for by_depth in ("reached_by_depth", "tried_by_depth")
    )
    return reached / tried


async def test_versions_change_during_sessions_and_no_text_changes(tmp_path: Path, prompts: list[str]) -> None:
    prompts = prompts[:4]
    async with served() as cluster:
        plain = await cluster.all_of(prompts, speculation="off")
        first = [await cluster.all_of(prompts) for _ in range(3)]
        running = asyncio.create_task(cluster.all_of(prompts))
        await cluster.publish(1, MODELS / "mid")  # a better one
        await cluster.logged("drafts with version 1")
        across = await running
        better = [await cluster.all_of(prompts) for _ in range(3)]
        await cluster.publish(2, spoilt(tmp_path / "2", at_random))
        await cluster.logged("drafts with version 2")
        worse = [await cluster.all_of(prompts)]
        while not any("back to version 1" in line for line in cluster.lines):
            worse.append(await cluster.all_of(prompts))
        again = [await cluster.all_of(prompts) for _ in range(4)]
        published = await cluster.versions.read()
    texts = [answer.token_ids for answer in plain]
    for answers in (*first, across, *better, *worse, *again):
        assert [answer.token_ids for answer in answers] == texts
    assert list(published.withdrawn) == list(published.doubted) == [2]
    usual, best = max(map(accepted, first)), max(map(accepted, better))
    assert best > 1.5 * usual
    assert min(map(accepted, worse)) < 0.5 * usual
    print("accepted:", *(f"{accepted(answers):.2f}" for answers in (*first, across, *better, *worse, *again)))
    assert max(map(accepted, again)) > 0.9 * best


async def test_a_version_that_does_not_fit_the_drafter_is_refused_with_the_reason(
    tmp_path: Path, prompts: list[str]
) -> None:
    def renamed(text: str) -> str:
        return text.replace('"max_position_embeddings": 1024', '"max_position_embeddings": 512')

    shorter = spoilt(tmp_path / "shorter", lambda weights: None)
    (shorter / "config.json").write_text(renamed((shorter / "config.json").read_text()))
    async with served() as cluster:
        await cluster.publish(1, shorter)
        await cluster.logged("version 1 is not used: ")
        assert any("its context differs" in line for line in cluster.lines)
        assert await cluster.versions.publish(Version(2, str(tmp_path / "nowhere"), "", "target", "", DIGEST))
        await cluster.logged("version 2 is not used: ")
        await cluster.all_of(prompts[:2])
    assert not any("drafts with version" in line for line in cluster.lines)


@asynccontextmanager
async def training(cluster: Served, models: Path, output: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a user starts it, with all the time that it wants."""
    flags = ["--model", models / "drafter", "--target", "target", "--output", output, "--share", "1", "--rate", "3e-3"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "outrider.cli", "train", "online"),
        *map(str, (*flags, "--batch", "8", "--every", "10")),
        env={**os.environ, "REDIS_URL": cluster.trainer_redis},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            assert await process.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 1])
async def test_a_bad_drafter_improves_while_drafting_even_if_its_trainer_is_killed(tmp_path: Path, kills: int) -> None:
    make_tiny(tmp_path / "target", layers=1, width=32)
    make_tiny(tmp_path / "drafter", layers=1, width=32, astray=0.8)
    prompts = [" ".join(f"w{(7 * text + 3 * place) % VOCABULARY}" for place in range(8)) for text in range(4)]
    terms = {"max_tokens": 100, "temperature": 1.0}
    async with served(tmp_path) as cluster:
        plain = {seed: await cluster.all_of(prompts, seed=seed, speculation="off", **terms) for seed in range(3)}
        rounds = [await cluster.all_of(prompts, seed=0, **terms)]

        async def until(number: int) -> None:
            """Traffic goes on until the drafter drafts with that version or a later one."""
            version = re.compile(r"drafts with version (\d+)")
            async with asyncio.timeout(60):
                while max([0, *(int(found[1]) for line in cluster.lines if (found := version.search(line)))]) < number:
                    rounds.append(await cluster.all_of(prompts, seed=len(rounds) % 3, **terms))

        for _ in range(kills + 1):
            async with training(cluster, tmp_path, tmp_path / "made") as process:
                await until((await cluster.versions.read()).latest + 1)
                if kills:
                    process.kill()
                    await process.wait()
        rounds += [await cluster.all_of(prompts, seed=seed, **terms) for seed in (1, 2, 0)]
    for number, answers in enumerate(rounds[:-3]):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain[number % 3]]
    assert [answer.token_ids for answer in rounds[-1]] == [answer.token_ids for answer in plain[0]]
    print(f"accepted: {accepted(rounds[0]):.2f}, then {accepted(rounds[-1]):.2f}")
    assert accepted(rounds[-1]) > 1.2 * accepted(rounds[0])
