"""A cluster whose tenants do not trust each other, and eight well-behaved callers of one of them, who are measured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import openai

import outrider
from bench.low_rank_files import make_adapter
from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, TlsConfig, VerifierConfig
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.errors import OutriderError
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.certificates import make
from outrider.store.api_keys import Keys
from outrider.store.redis.client import connect
from outrider.store.sessions import claim_name
from router.requests.template_sandbox import MOST_BYTES
from tests.altered import altered
from tests.e2e.conftest import MODELS
from tests.e2e.test_faults import free_port
from tests.hostile.attacks import CLAIM, Outcome, Target

CALLERS = 8
PERIOD_S = 1.0  # from one request of a caller to its next one
SLOTS = 16
ANSWER = 12  # tokens
MARK = "zyx_marker_7431"  # no server writes it by itself
MARK_LENGTH = 24  # characters of an answer that would not be received by chance
LOOK_S = 0.05  # between two looks at the memory
IDEMPOTENCY_KEY = "first-of-good"
ADAPTER, SECRET_ADAPTER = "good-adapter", "zyx-adapter-7431"  # of the tenant that is attacked; the attacker knows one
ROUTER_FILES = {"ca": "ca.pem", "cert": "router.pem", "key": "router.key"}
AHEAD_S = 75.0  # of the other router's clock
LIMITS: dict[str, Any] = {  # for tenants that do not trust each other: docs/security.md
    "max_sessions": SLOTS,
    "tenant_sessions": SLOTS // 2,
    "queue_per_tenant": 16,
    "tenant_requests_per_s": 10,
    "tenant_tokens_per_min": 30_000,
    "tenant_stored_sessions": 4096,
    "tenant_stored_bytes": 2**25,
    "max_request_bytes": 2**16,
    "template_s": 0.05,
    "session_ttl_s": 120,
}
BOUNDS = {  # bytes of each process at most, as in docs/security.md
    "router": 256 * 2**20,
    "gateway": 256 * 2**20,
    "verifier-0": 256 * 2**20,
    "drafter-0": 256 * 2**20,
    "redis": 128 * 2**20,
    "template": MOST_BYTES,  # each process that renders
    "grammars": 512 * 2**20,  # all processes of one server's grammars, what they share counted once
}
TEMPLATE = (  # takes time in proportion to a number in the first message
    "{% for _ in range(messages[0].content | int(0)) %}{% for _ in range(1000) %}{% endfor %}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@dataclass
class Measured:
    """What the well-behaved callers got, and what the servers took meanwhile."""

    first_tokens: list[float] = field(default_factory=list)  # s
    failures: list[str] = field(default_factory=list)  # errors, and answers that are not the undisturbed ones
    memory: dict[str, int] = field(default_factory=dict)  # bytes of each process at most
    processor_s: dict[str, float] = field(default_factory=dict)


class AttackerProcess:
    """An attack, in a process of its own. Once entered it attacks; leaving kills it."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.hostile.attacks"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Linux shares processors between sessions: this one gets a small share
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(self._target)).encode())
        self._process.stdin.close()
        if not await self._process.stdout.readline():
            raise RuntimeError(f"the attacker's process ended with {await self._process.wait()}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        with suppress(ProcessLookupError):  # with all that it has started
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def outcome(self) -> Outcome:
        """Return what became of the attack, once it is over."""
        assert self._process.stdout is not None
        printed = await self._process.stdout.read()
        if status := await self._process.wait():
            raise RuntimeError(f"the attacker's process ended with {status}")
        return Outcome(**json.loads(printed))


class Besieged:
    """The cluster, its two tenants, and the callers of the one that is attacked."""

    def __init__(
        self,
        cluster: LocalCluster,
        good: outrider.AsyncClient,
        ahead: outrider.AsyncClient,
        web: openai.AsyncOpenAI,
        bad: str,
        folder: Path,
        pages: Mapping[str, str],
    ) -> None:
        """`ahead`: a client of the router whose clock is ahead; `bad`: the attacker's key; `folder`: has certificates,
        and a folder of each tenant's adapters; `pages`: for Prometheus, by the server's name."""
        self._cluster = cluster
        self._folder = folder
        self._pages = pages
        self._client = good
        self._ahead = ahead
        self._web = web
        self._bad = bad
        self._answers: list[str] = []  # undisturbed, by caller

    async def begin(self) -> None:
        """Load the adapter of one caller, and receive the undisturbed answers."""
        for name in (ADAPTER, SECRET_ADAPTER):
            await self._client.load_adapter(name, "sql")
        self._answers = [(await self._ask(number))[1] for number in range(CALLERS)]

    async def attack(self, name: str, seconds: float, size: float = 1.0) -> tuple[Measured, Outcome]:
        """Measure the callers during an attack."""
        options: dict[str, Any] = {"max_tokens": 64, "seed": 1, "temperature": 1.0, "ignore_eos": True}
        kept = await self._client.generate(f"{MARK} = ", idempotency_key=IDEMPOTENCY_KEY + name, **options)
        texts = (*self._answers, kept.text)
        target = Target(
            attack=name,
            seconds=seconds,
            router=self._cluster.router_address,
            other_router=self._ahead.address,
            gateway=self._cluster.processes["gateway"].address,
            verifier=self._cluster.processes["verifier-0"].address,
            redis=self._cluster.redis_url_of("drafter"),
            certificates=str(self._folder / "certs"),
            key=self._bad,
            sessions=[kept.session_id],
            idempotency_key=IDEMPOTENCY_KEY + name,
            adapter=ADAPTER,
            adapters=str(self._folder / "adapters/bad"),
            marks=[MARK, SECRET_ADAPTER, *(text[-MARK_LENGTH:] for text in texts if len(text) >= MARK_LENGTH)],
            size=size,
        )
        before = await self._counted()
        async with AttackerProcess(target) as attacker:
            attacking = asyncio.create_task(attacker.outcome())
            measured = await self.measure(attacking.done)
            outcome = await attacking
        after = await self._counted()
        measured.failures += [
            f"{what}: {before.get(what)}, {after.get(what)} after the attack"
            for what in sorted(before.keys() | after.keys())
            if before.get(what) != after.get(what)
        ]
        if await self._again(kept.session_id) != kept.text:
            measured.failures.append("the session whose id the attacker had is not as it was")
        return measured, outcome

    async def _counted(self) -> dict[str, float]:
        """What no attack may change: the processes, how often their event loops stood still, generations that moved."""
        found: dict[str, float] = {f"process {name}": it.pid for name, it in self._cluster.processes.items()}
        for name, address in self._pages.items():
            page = await asyncio.to_thread(_page, address)
            found[f"stalls of {name}"] = number_in(page, "outrider_loop_stalls_total")
            if name.startswith("router"):
                found[f"generations of {name} that moved"] = number_in(page, "outrider_moves_total")
        return found

    async def claimed(self, count: int) -> list[str]:
        """The idempotency keys that the attack "claims" holds, of `count` calls."""
        keys = [f"{CLAIM}{number}" for number in range(count)]
        async with aclosing(connect(self._cluster.redis_url)) as redis:
            return [key for key in keys if await redis.exists(f"outrider:idempotency:{claim_name('bad', key)}")]

    async def _again(self, session: str) -> str:
        """The text of a session's answer."""
        pieces = [chunk.text async for chunk in self._client.resume(session, timeout=30)]
        return "".join(pieces)

    async def measure(self, over: Callable[[], bool]) -> Measured:
        """Measure all callers until `over` returns true."""
        measured = Measured()
        before = self._processor_s()
        looking = asyncio.create_task(self._look(measured.memory))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(CALLERS):
                    group.create_task(self._call(number, over, measured))
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        after = self._processor_s()
        measured.processor_s = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after}
        return measured

    async def undisturbed(self, seconds: float) -> Measured:
        """Measure all callers where nobody attacks."""
        end = time.monotonic() + seconds
        return await self.measure(lambda: time.monotonic() >= end)

    async def _call(self, number: int, over: Callable[[], bool], measured: Measured) -> None:
        """One caller, who asks again and again."""
        await asyncio.sleep(PERIOD_S * number / CALLERS)
        while not over():
            began = time.monotonic()
            try:
                first, text = await self._ask(number)
            except (OutriderError, openai.OpenAIError) as error:
                measured.failures.append(f"caller {number}: {type(error).__name__}: {error}")
            else:
                measured.first_tokens.append(first)
                if text != self._answers[number]:
                    measured.failures.append(f"caller {number}: {text!r} in place of {self._answers[number]!r}")
            await asyncio.sleep(max(0.0, began + PERIOD_S - time.monotonic()))

    async def _ask(self, number: int) -> tuple[float, str]:
        """Seconds to the first token, and the whole answer. Half of the callers call the gateway, one the router whose
        clock is ahead, two have a conversation, and one has an adapter."""
        prompt = f"# {MARK} {number}\ndef method_{number}(self, value):\n    return"
        began, first, text = time.monotonic(), 0.0, ""
        if number % 2:
            options: dict[str, Any] = {
                "seed": number,
                "temperature": 1.0,
                "extra_body": {"outrider": {"ignore_eos": True}},
            }
            if number == 1:
                chat = [{"role": "user", "content": prompt}]
                stream = await self._web.chat.completions.create(
                    model="target", messages=chat, stream=True, max_completion_tokens=ANSWER, **options
                )
            else:
                stream = await self._web.completions.create(
                    model="target", prompt=prompt, stream=True, max_tokens=ANSWER, **options
                )
            async for event in stream:
                piece = event.choices[0].delta.content if number == 1 else event.choices[0].text
                if piece and not first:
                    first = time.monotonic() - began
                text += piece or ""
            return first, text
        asked: dict[str, Any] = {"seed": number, "temperature": 1.0, "max_tokens": ANSWER, "ignore_eos": True}
        asked |= {"prompt": prompt} if number else {"messages": [{"role": "user", "content": prompt}]}
        asked |= {"model": ADAPTER} if number == CALLERS - 2 else {}
        client = self._ahead if number == 4 else self._client
        async for chunk in client.stream(timeout=60, **asked):
            if chunk.token_ids and not first:
                first = time.monotonic() - began
            text += chunk.text
        return first, text

    async def _look(self, memory: dict[str, int]) -> None:
        while True:
            for name, pid in self._pids().items():
                memory[name] = max(memory.get(name, 0), resident_bytes(pid))
            memory["template"] = max(memory.get("template", 0), await asyncio.to_thread(self._template))
            memory["grammars"] = max(memory.get("grammars", 0), await asyncio.to_thread(self._grammars))
            await asyncio.sleep(LOOK_S)

    def _pids(self) -> dict[str, int]:
        """The servers' processes, and the router's for its model's template."""
        pids = {name: process.pid for name, process in self._cluster.processes.items()}
        redis = self._cluster._redis
        assert redis is not None
        pids["redis"] = redis.pid
        for child in self._sandboxes()[:1]:
            pids["template"] = child
        return pids

    def _sandboxes(self) -> list[int]:
        """The router's processes for templates: its model's, and the one that is forked for callers'."""
        router = self._cluster.processes["router"].pid
        return [child for child in children(router) if "template_sandbox" in command_of(child)]

    def _template(self) -> int:
        """Bytes of the largest process that renders a template."""
        first = self._sandboxes()
        return max(map(resident_bytes, (*first, *(pid for each in first for pid in children(each)))), default=0)

    def _grammars(self) -> int:
        """Bytes of the processes of grammars of the server that has most."""
        servers = [process.pid for process in self._cluster.processes.values()]
        firsts = [child for pid in servers for child in children(pid) if "grammar.child" in command_of(child)]
        return max((sum(map(proportional_bytes, (first, *children(first)))) for first in firsts), default=0)

    def _processor_s(self) -> dict[str, float]:
        return {name: processor_s(pid) for name, pid in self._pids().items()}


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    return ""


def proportional_bytes(pid: int) -> int:
    """Memory that a process holds, with its share of what it has in common with others; 0 if it has ended."""
    with suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    return 0


def number_in(page: str, name: str) -> float:
    """The sum of a metric's samples on a page for Prometheus."""
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def _page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())


def resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def processor_s(pid: int) -> float:
    """Seconds that a process has taken of a processor; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def besieged(forward: Callable[[str, str], None] = lambda name, line: None) -> AsyncIterator[Besieged]:
    """A running cluster with certificates, a gateway, keys of two tenants, and a second router of another time."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="besieged-")))
        model, adapters, certificates = folder / "target", folder / "adapters", folder / "certs"
        _write_model(model)
        make(certificates, drafters=["mallory"])
        ca = certificates / "ca.pem"
        make_adapter(adapters / "good" / "sql", read_config(MODELS / "target"), 4, 1, deviation=0.1)
        metrics, pages = "127.0.0.1:0", dict[str, str]()
        config = ClusterConfig(
            tls=TlsConfig(
                ca=certificates / "ca.pem", cert=certificates / "{role}.pem", key=certificates / "{role}.key"
            ),
            router=RouterConfig(
                listen="127.0.0.1:0",
                models={"target": model},
                auth="keys",
                adapter_loaders=("good", "bad"),
                metrics=metrics,
                **LIMITS,
            ),
            verifier=[
                VerifierConfig(
                    model=MODELS / "target", dtype="float32", slots=SLOTS, adapters=adapters, metrics=metrics
                )
            ],
            drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32", slots=SLOTS, metrics=metrics)],
            gateway=GatewayConfig(listen="127.0.0.1:0", max_request_bytes=LIMITS["max_request_bytes"], metrics=metrics),
        )

        def listen(name: str, line: str) -> None:
            if ": metrics at " in line:
                pages[name] = line.rpartition(" ")[2]
            forward(name, line)

        cluster = await stack.enter_async_context(LocalCluster(config, forward=listen))
        page = f"127.0.0.1:{free_port()}"
        arguments = (*_router_arguments(model, certificates), "--metrics", page)
        other = await stack.enter_async_context(altered(cluster.redis_url_of("router"), *arguments, skew_s=AHEAD_S))
        pages["router-1"] = f"http://{page}/metrics"
        async with aclosing(connect(cluster.redis_url)) as redis:
            good, bad = [(await Keys(redis).add(tenant))[0] for tenant in ("good", "bad")]
        client, ahead = [
            await stack.enter_async_context(outrider.AsyncClient(address, api_key=good, ca=ca, retries=0))
            for address in (cluster.router_address, other.address)
        ]
        web = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"https://{cluster.processes['gateway'].address}/v1",
                api_key=good,
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=ca)),
            )
        )
        running = Besieged(cluster, client, ahead, web, bad, folder, pages)
        await running.begin()
        yield running


def _write_model(folder: Path) -> None:
    """The target's configuration and tokenizer, with the template of these tests."""
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODELS / "target" / file, folder / file)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _router_arguments(model: Path, certificates: Path) -> list[str]:
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    files = [f"--{kind}={certificates / name}" for kind, name in ROUTER_FILES.items()]
    return ["router", "--model", f"target={model}", "--auth", "keys", *limits, *files]
