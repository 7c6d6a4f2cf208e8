"""One request, one trace: through SDK, router, verifier and drafters of two tiers, received by a real collector."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import pytest
import pytest_asyncio

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.telemetry.catalogue import METRICS
from outrider.v1.types_pb2 import DescribeRequest
from outrider.v1.verifier_pb2_grpc import VerifierStub
from tests.e2e.conftest import MODELS
from tests.engine.small_adapters import make_adapter
from tests.telemetry.caller import PROMPT
from tests.telemetry.collector import Collector, Span, collecting

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 400


class Watched:
    """A cluster that is watched."""

    def __init__(self, cluster: LocalCluster, collector: Collector, lines: list[str]) -> None:
        self.cluster = cluster
        self.collector = collector
        self.lines = lines  # what its servers logged

    async def ask(self, *arguments: str, sampled: bool = True, wait: bool = True) -> tuple[bytes, list[str]]:
        """Has another program ask. Return its trace's id, and what it printed further."""
        sampler = {"OTEL_TRACES_SAMPLER": "always_on" if sampled else "always_off"}
        caller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.telemetry.caller", self.cluster.router_address, *arguments),
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **self.collector.environment, **sampler},
        )
        assert caller.stdout is not None
        trace = bytes.fromhex((await caller.stdout.readline()).decode().strip())
        if not wait:
            while not await self.running():
                await asyncio.sleep(0.02)
            with self.stopped("verifier-0"):  # or the generation might end before the cancel arrives
                caller.kill()
                await caller.wait()
                await asyncio.sleep(0.3)
        printed = (await caller.stdout.read()).decode().splitlines()
        await caller.wait()
        return trace, printed

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A server that stands still meanwhile."""
        pid = self.cluster.processes[name].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    async def running(self) -> int:
        """Sessions that the verifier has open."""
        async with open_channel(self.cluster.processes["verifier-0"].address) as channel:
            return (await VerifierStub(channel).Describe(DescribeRequest())).sessions

    async def call(self, trace: bytes) -> Span:
        """The span of the call to the router, once it is there."""
        return (await self.named(trace, "outrider.v1.Inference/Generate", "router"))[0]

    async def named(self, trace: bytes, name: str, service: str) -> list[Span]:
        found: list[Span] = []

        def there() -> bool:
            spans = self.collector.of(trace)
            found[:] = [span for span in spans if span.name == name and span.service == f"outrider-{service}"]
            return bool(found)

        await self.collector.until(there)
        return found


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    """Drafter 0 judges what drafter 1 drafts."""
    target, lines = MODELS / "target", list[str]()
    adapters = make_adapter(target, tmp_path_factory.mktemp("adapters") / "formal").parent
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0",
            models={"target": target},
            tiers="all",
            policy="rounds",  # steps wait for drafts, however busy the machine is
            depth=4,
            metrics="127.0.0.1:0",
            log_format="json",
            trust_traces=True,
            adapter_loaders=("*",),
        ),
        verifier=[
            VerifierConfig(model=target, adapters=adapters, dtype="float32", metrics="127.0.0.1:0", log_format="json")
        ],
        tier={
            0: [
                DrafterConfig(
                    model=MODELS / "mid", dtype="float32", metrics="127.0.0.1:0", log_format="json", learns=True
                )
            ],
            1: [DrafterConfig(model=MODELS / "drafter", dtype="float32", metrics="127.0.0.1:0", log_format="json")],
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        async with collecting() as collector:
            for name, value in collector.environment.items():
                patch.setenv(name, value)
            async with LocalCluster(config, forward=lambda name, line: lines.append(line)) as cluster:
                await _warm(cluster)
                yield Watched(cluster, collector, lines)


async def _warm(cluster: LocalCluster) -> None:
    """Until both tiers have drafted: on a busy machine a drafter may need longer to answer for the first time than a
    router waits."""
    async with outrider.AsyncClient(cluster.router_address) as client, asyncio.timeout(60):
        drafters = 0
        while drafters < 2:
            session = (await client.create_session("target")).session_id
            await client.generate(PROMPT, session=session, max_tokens=64, ignore_eos=True)
            drafters = len((await client.get_session(session)).drafters)


async def test_a_request_is_one_trace_through_all_processes(watched: Watched) -> None:
    trace, (figures, *_) = await watched.ask(str(TOKENS))
    steps, verified, accepted, session = figures.split()
    await watched.named(trace, "drafting", "drafter")
    await watched.collector.until(lambda: _drafting(watched.collector.of(trace)) >= 2)
    await asyncio.sleep(0.5)  # what is still on its way
    spans = watched.collector.of(trace)
    by_id = {span.identity: span for span in spans}

    def path(span: Span) -> str:
        own = f"{span.service.removeprefix('outrider-')}:{span.name.rpartition('/')[2]}"
        return f"{path(by_id[span.parent])} > {own}" if span.parent else own

    there = Counter(map(path, spans))
    generate = "caller:question > caller:generate > router:Generate"
    decode = f"{generate} > router:Decode"
    drafting = f"{decode} > router:Attach > drafter:Attach > drafter:drafting"
    assert there["caller:question"] == there[generate] == there[f"{generate} > router:wait for a place"] == 1
    assert there[f"{decode} > verifier:Decode"] == 1
    assert there[f"{decode} > verifier:Decode > verifier:verify"] == int(steps)
    assert there[f"{decode} > verifier:Decode > verifier:read"] <= 1
    # Of each tier one, and one more whenever the plan begins to draft anew, which attaches the drafter again.
    assert 2 <= there[drafting] <= there[drafting.removesuffix(" > drafter:drafting")]
    assert there[f"{drafting} > drafter:draft"] > 2
    assert len({span.instance for span in spans if span.name == "draft"}) == 2  # both tiers
    assert all(span.began <= span.ended for span in spans)

    step_spans = [span for span in spans if span.name == "verify"]
    assert sum(span.about["outrider.tokens.committed"] for span in step_spans) == TOKENS
    assert sum(span.about["outrider.nodes.verified"] for span in step_spans) == int(verified)
    assert sum(span.about["outrider.nodes.accepted"] for span in step_spans) == int(accepted) > 0
    assert all(
        span.about["outrider.nodes.verified"]
        == span.about["outrider.nodes.accepted"] + span.about["outrider.nodes.rejected"]
        and span.about["outrider.nodes.held"]
        == span.about["outrider.nodes.verified"] + span.about["outrider.nodes.left_out"]
        for span in step_spans
    )
    linked = [by_id[link] for span in step_spans for link in span.links]
    assert {span.name for span in linked} == {"draft"}
    assert {span.about["outrider.session.id"] for span in spans if span.name == "drafting"} == {session}
    assert any(span.links for span in step_spans)
    assert not any(span.error for span in spans)
    answer = next(span for span in spans if path(span) == generate)
    assert answer.about["gen_ai.usage.output_tokens"] == TOKENS
    assert answer.about["gen_ai.response.finish_reasons"] == ["length"]
    assert {span.about["rpc.response.status_code"] for span in spans if "rpc.method" in span.about} == {"OK"}


def _drafting(spans: list[Span]) -> int:
    return sum(span.name == "drafting" for span in spans)


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_gateway_request_is_part_of_its_callers_trace_or_linked_to_it(watched: Watched, trusted: bool) -> None:
    trace, parent = secrets.token_bytes(16), secrets.token_bytes(8)
    flags = ("--router", watched.cluster.router_address, "--listen", "127.0.0.1:0", "--trust-traces")
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", "gateway", *flags[: 5 if trusted else 4]),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OTEL_TRACES_SAMPLER": "parentbased_always_on"},
    )
    try:
        assert gateway.stdout is not None
        address = (await gateway.stdout.readline()).decode().split()[-1]
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"http://{address}/v1/completions",
                json={"model": "target", "prompt": PROMPT, "max_tokens": 5},
                headers={"traceparent": f"00-{trace.hex()}-{parent.hex()}-0{int(trusted)}"},
                timeout=30,
            )
        assert answer.status_code == 200
        if not trusted:  # the caller's trace is not kept, and the gateway's own is
            spans = watched.collector.spans
            await watched.collector.until(lambda: any(parent in span.links for span in list(spans)))
            trace, caller = next(span.trace for span in list(spans) if parent in span.links), trace
            assert watched.collector.of(caller) == []
        (request,) = await watched.named(trace, "POST /v1/completions", "gateway")
        (generate,) = await watched.named(trace, "generate", "gateway")
        (endpoint,) = await watched.named(trace, "fastapi.endpoint", "gateway")
        assert (request.parent, request.links) == ((parent, ()) if trusted else (b"", (parent,)))
        assert (endpoint.parent, generate.parent) == (request.identity, endpoint.identity)
        assert request.about["http.response.status_code"] == 200
        assert (await watched.call(trace)).parent == generate.identity
    finally:
        gateway.terminate()
        await gateway.wait()


async def test_a_call_that_is_cancelled_is_reported_as_cancelled(watched: Watched) -> None:
    trace, _ = await watched.ask("900", wait=False)
    call = await watched.call(trace)
    assert call.about["rpc.response.status_code"] == "CANCELLED"
    assert not call.error
    decode = (await watched.named(trace, "outrider.v1.Verifier/Decode", "verifier"))[0]
    assert decode.about["rpc.response.status_code"] == "CANCELLED"
    assert not decode.error


async def test_a_call_that_ran_out_of_time_is_reported_as_such(watched: Watched) -> None:
    trace, printed = await watched.ask("900", "0.4")
    assert printed == ["DeadlineExceeded"]
    call = await watched.call(trace)
    ended = call.about["rpc.response.status_code"], call.about.get("gen_ai.response.finish_reasons")
    assert ended in (("DEADLINE_EXCEEDED", None), ("OK", ["deadline"]))
    assert call.error == (ended[0] != "OK")


async def test_the_caller_decides_whether_its_call_is_traced(watched: Watched) -> None:
    trace, printed = await watched.ask("8", sampled=False)
    assert len(printed) == 2
    await asyncio.sleep(0.5)
    assert not watched.collector.of(trace)


async def test_neither_prompts_nor_answers_are_exported_or_logged(watched: Watched) -> None:
    _, (_, text) = await watched.ask("40")
    await asyncio.sleep(0.8)
    word = max(text.split(), key=len)
    assert len(word) > 3
    emitted = b"".join(watched.collector.raw) + "\n".join(watched.lines).encode()
    assert b"winnow" in PROMPT.encode()
    assert b"winnow" not in emitted
    assert text[:24].encode() not in emitted


async def test_all_metrics_arrive_by_otlp_and_on_the_prometheus_page(watched: Watched) -> None:
    await watched.ask(str(TOKENS))
    async with outrider.AsyncClient(watched.cluster.router_address) as client:
        await client.load_adapter("formal", "formal")
        await client.generate(PROMPT, model="formal", max_tokens=20, timeout=60)
    roles = {"router", "verifier", "drafter"}  # tests/gateway/test_cluster.py has the gateway's
    every = [(metric, role) for metric in METRICS for role in roles.intersection(metric.role.split(", "))]
    for metric, role in every:
        received = watched.collector.metrics[f"outrider-{role}"]
        await watched.collector.until(lambda received=received, name=metric.name: name in received)
    pages: dict[str, str] = defaultdict(str)  # of all that have a role: one drafter alone learns
    for role, address in _pages(watched.lines):
        pages[role] += "\n" + await asyncio.to_thread(_page, address)
    for metric, role in every:
        assert f"\n# TYPE {metric.exposed} " in pages[role], role


def _pages(lines: list[str]) -> list[tuple[str, str]]:
    """Roles and addresses, as servers log them."""
    bodies = [json.loads(line)["body"] for line in list(lines) if line.startswith("{")]
    return [(one.split(": ")[0], one.rpartition(" ")[2]) for one in bodies if ": metrics at " in one]


def _page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return str(answer.read().decode())


async def test_servers_log_in_json(watched: Watched) -> None:
    lines = [json.loads(line) for line in watched.lines if line.startswith("{")]
    assert all({"timestamp", "severity", "logger", "body"} <= line.keys() for line in lines)
    assert {line["logger"] for line in lines} & {"outrider.telemetry.process"}
