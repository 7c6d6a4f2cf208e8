"""Why is it not speculating? Every result has the reason, and so has everything that shows one."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

import outrider
from outrider import SpeculationReason, SpeculationStatus
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.model_card import ModelCard, write_card
from outrider.fleet.cluster import LocalCluster
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc
from tests.drafter.other_tokenizer import make_other
from tests.e2e.conftest import MODELS
from tests.engine.taught import random_heads

pytestmark = pytest.mark.asyncio(loop_scope="session")

TARGET = MODELS / "target"
GOOD = DrafterConfig(model=MODELS / "drafter", dtype="float32")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the servers print."""
    return []


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> AsyncIterator[LocalCluster]:
    """A target, and a model with another tokenizer, without drafters: each test brings its own."""
    other = make_other(tmp_path_factory.mktemp("models") / "other")
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET, "other": other}, metrics="127.0.0.1:0"),
        verifier=[VerifierConfig(model=TARGET, dtype="float32"), VerifierConfig(model=other)],
    )
    async with LocalCluster(config, forward=lambda name, line: lines.append(line)) as running:
        yield running


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter whose card names another target."""
    folder = tmp_path_factory.mktemp("trained") / "trained"
    folder.mkdir()
    for file in (MODELS / "drafter").iterdir():
        (folder / file.name).symlink_to(file)
    digests = {"target_digest": "0" * 32, "tokenizer_digest": ""}
    write_card(folder, ModelCard("drafter", "mid", objective="agreement", tokens=1, seconds=1.0, **digests))
    return folder


@pytest.fixture(scope="module")
def page(cluster: LocalCluster, lines: list[str]) -> str:
    """Where the router shows itself."""
    (address,) = [line.rpartition("http://")[2].partition("/")[0] for line in lines if "metrics at" in line]
    return address


async def glance(page: str) -> Any:
    def get() -> Any:
        with urllib.request.urlopen(f"http://{page}/live", timeout=10) as answer:
            return json.load(answer)

    return await asyncio.to_thread(get)


async def status(cluster: LocalCluster, *drafters: DrafterConfig, tokens: int = 600, **terms: str) -> SpeculationStatus:
    """Of an answer that these drafters were there for. Unless it is asked for, it never rests."""
    await cluster.scale(drafters)
    terms.setdefault("speculation", "rounds")
    async with outrider.AsyncClient(cluster.router_address) as client:
        await seen(client, len(drafters))
        result = await client.generate("import os\n", model="target", max_tokens=tokens, ignore_eos=True, **terms)  # type: ignore[arg-type]
    return result.usage.speculation


async def seen(client: outrider.AsyncClient, drafters: int) -> None:
    """Waits until the router sees that number of drafters, whatever they are for."""
    async with asyncio.timeout(20):
        while True:
            (target,) = [model for model in await client.models() if model.name == "target"]
            fitting = target.drafters - sum("trained for" in misfit for misfit in target.misfits)
            if fitting + len(target.misfits) == drafters:
                return
            await asyncio.sleep(0.05)


async def command(*arguments: str) -> str:
    """What a command prints, on both streams."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await running.communicate()
    return output.decode()


async def test_a_fitting_drafter_is_reported_as_drafting(cluster: LocalCluster) -> None:
    found = await status(cluster, GOOD)
    assert (found.reason, found.detail) == (SpeculationReason.DRAFTING, "")


async def test_a_cluster_without_a_drafter_reports_no_drafter(cluster: LocalCluster) -> None:
    await cluster.scale([])
    asked = ("import os", "--model", "target", "--max-tokens", "200", "--ignore-eos")
    output = await command("generate", *asked, "--address", cluster.router_address)
    last = output.splitlines()[-1]
    assert last == "outrider: no speculation: no drafter is running; start one with `outrider drafter`"
    found = await status(cluster)
    assert found.reason is SpeculationReason.NO_DRAFTER
    assert found.steps == 600
    assert found.explanation == "no drafter is running; start one with `outrider drafter`"


async def test_a_request_that_switches_speculation_off_is_reported(cluster: LocalCluster) -> None:
    found = await status(cluster, GOOD, tokens=20, speculation="off")
    assert found.reason is SpeculationReason.OFF_BY_REQUEST


async def test_the_only_drafter_has_another_tokenizer(cluster: LocalCluster, tmp_path: Path) -> None:
    found = await status(cluster, DrafterConfig(model=make_other(tmp_path / "third"), dtype="float32"), tokens=20)
    assert found.reason is SpeculationReason.OTHER_TOKENIZER
    assert "is third, whose tokenizer is" in found.detail
    assert await cluster.misfits() == []  # it drafts for the other model, whose tokenizer it has


async def test_the_only_drafter_was_trained_for_another_target(cluster: LocalCluster, trained: Path) -> None:
    found = await status(cluster, DrafterConfig(model=trained, dtype="float32"), tokens=20)
    assert found.reason is SpeculationReason.OTHER_TARGET
    assert "is trained, trained for another model than target" in found.detail
    (misfit,) = await cluster.misfits()
    (name,) = [name for name, process in cluster.processes.items() if process.role == "drafter"]
    assert misfit.startswith(f"{name} drafts for nobody: the drafters were trained for another target (drafter 127.")
    assert misfit.endswith("train one for this target, or start the drafter with --any-target")
    described = await command("describe", cluster.router_address)
    assert "of no use" in described
    assert "were trained for another target" in " ".join(described.split())


async def test_a_rule_that_draws_from_q_is_nothing_for_a_drafter_without_a_model(cluster: LocalCluster) -> None:
    lookup = DrafterConfig(model=MODELS / "drafter", drafts="suffix")
    found = await status(cluster, lookup, tokens=20, rule="speculative-sampling")
    assert found.reason is SpeculationReason.RULE
    assert "shared-noise" in found.explanation


async def test_the_drafter_is_refused_by_a_verifier_of_another_tokenizer(cluster: LocalCluster) -> None:
    """The drafter reaches it by a tunnel that leads to the wrong one."""
    astray = GOOD.model_copy(update={"via": cluster.processes["verifier-1"].address})
    found = await status(cluster, astray, tokens=1000)  # for most of them the refusal is known
    assert found.reason is SpeculationReason.REFUSED
    assert "uses another tokenizer" in found.detail
    assert cluster.processes["verifier-0"].address in found.detail
    (drafter,) = [process.address for process in cluster.processes.values() if process.role == "drafter"]
    async with grpc.aio.insecure_channel(drafter) as channel:  # other sessions hear of it at once
        other = pb.AttachRequest(session_id="other", epoch=1, upstream=cluster.processes["verifier-0"].address)
        answer = await drafter_pb2_grpc.DrafterStub(channel).Attach(other)
    assert "uses another tokenizer" in answer.refused


async def test_the_upstream_cannot_be_reached_by_the_drafter(cluster: LocalCluster) -> None:
    found = await status(cluster, GOOD.model_copy(update={"via": "127.0.0.1:1"}))
    assert found.reason is SpeculationReason.UNREACHABLE


async def test_a_drafter_without_a_free_slot_is_reported(cluster: LocalCluster) -> None:
    """A drafter as slow as the target and mostly wrong, so that the session in its slot takes long."""
    await cluster.scale([DrafterConfig(model=TARGET, dtype="float32", skip=(0,), slots=1)])
    async with outrider.AsyncClient(cluster.router_address) as client:
        await seen(client, 1)
        session = (await client.create_session("target")).session_id
        first = asyncio.create_task(
            client.generate("def f(", session=session, max_tokens=1000, ignore_eos=True, speculation="rounds")
        )
        async with aclosing(client.watch(session)) as steps:
            async for step in steps:
                if step.nodes:  # the drafter's slot is taken
                    break
        result = await client.generate(
            "import os\n", model="target", max_tokens=20, ignore_eos=True, speculation="rounds"
        )
        assert not first.done()
        await client.cancel(session)
        await first
    assert result.usage.speculation.reason is SpeculationReason.BUSY
    assert "all 1 slots of this drafter are in use" in result.usage.speculation.detail


async def test_drafting_that_does_not_pay_rests_and_both_speeds_are_shown(cluster: LocalCluster, page: str) -> None:
    """A drafter that is as slow as the target on the same cores, and wrong."""
    await cluster.scale([DrafterConfig(model=TARGET, dtype="float32", skip=(0,))])
    async with outrider.AsyncClient(cluster.router_address) as client:
        await seen(client, 1)
        over = False

        async def ask() -> None:
            while not over:
                await client.generate("def f(", model="target", max_tokens=1000, ignore_eos=True, speculation="fixed")

        asking = asyncio.create_task(ask())
        while not (shown := [one for one in (await glance(page))["generations"] if "plain" in one["why"]]):
            assert not asking.done()
            await asyncio.sleep(0.05)
        for _ in range(25):  # some of what is shown is from trials, which find out whether drafting pays
            shown += [one for one in (await glance(page))["generations"] if "plain" in one["why"]]
            await asyncio.sleep(0.1)
        terminal = ""
        while "with drafting" not in terminal:  # trials of it lie between
            assert not asking.done()
            terminal = " ".join((await command("top", page, "--once")).split())
        over = True
        await asking
    assert shown[0]["speculation"] == "resting"
    form = r" \(plain (\d+) tokens/s, with drafting (\d+)\); use a faster drafter"
    speeds = [[int(speed) for speed in matched.groups()] for one in shown if (matched := re.search(form, one["why"]))]
    plain, drafted = map(median, zip(*speeds, strict=True))
    assert plain >= drafted > 0
    assert "resting" in terminal


async def test_the_page_and_top_name_drafters_of_no_use(cluster: LocalCluster, page: str, trained: Path) -> None:
    await cluster.scale([DrafterConfig(model=trained, dtype="float32")])
    async with outrider.AsyncClient(cluster.router_address) as client:
        await seen(client, 1)
    target, _ = sorted((await glance(page))["models"], key=lambda one: one["name"] != "target")
    ((worker, why),) = target["misfits"]
    assert worker.startswith("drafter-")
    assert why.startswith("the drafters were trained for another target (")
    assert target["steps"]["no-drafter"] >= 80
    assert "the drafters were trained for another target" in " ".join((await command("top", page, "--once")).split())


async def test_up_warns_of_a_drafter_that_can_draft_for_no_verifier(tmp_path: Path) -> None:
    random_heads("eagle-3", TARGET, tmp_path / "heads")
    file = tmp_path / "cluster.toml"
    file.write_text(
        f'[router]\nlisten = "127.0.0.1:0"\nmodels = {{ target = "{TARGET}" }}\n[[verifier]]\nmodel = "{TARGET}"\n'
        f'[[drafter]]\nmodel = "{TARGET}"\nheads = "heads"\n'
    )
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", "up", str(file)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert up.stdout is not None
        output = ""
        async with asyncio.timeout(60):
            while "Try: " not in output:
                output += (await up.stdout.readline()).decode()
    finally:
        up.terminate()
        await up.wait()
    (line,) = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: drafter-0 drafts for nobody: its heads need the target's hidden states")
    assert f'set features = "{tmp_path / "heads"}"' in line
