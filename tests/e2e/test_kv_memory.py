"""Sessions that have too little memory for the target's KV together, with heads in the verifier and in a drafter: each
text is the target's, and drafts are accepted after a preemption, too.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from tokenizers import Tokenizer

from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import OFF, Contract, Plan
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import SCRATCH
from outrider.engine.interface.settings import EngineSettings
from outrider.fleet.cluster import LocalCluster
from tests.e2e.mini_router import SPECULATE, Answer, decode, trust
from tests.e2e.test_lookups import TARGET
from tests.e2e.test_remote_heads import ROUNDS
from tests.engine.taught import greedy, taught_heads
from tests.verifier.test_kv_memory import least_memory

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONTEXT, TOKENS, SESSIONS = 280, 100, 12
MAY_WAIT_MS = 100_000  # milliseconds that a session may be silent
WAITS = re.compile(r"session (\S+) waits: there is no memory for the KV of its (\d+) tokens")
PREEMPTIONS = re.compile(r"^outrider_kv_preemptions_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass
class Bounded:
    """A cluster whose verifier has memory for about three of its sessions, and what its servers have printed."""

    cluster: LocalCluster
    unused: int  # a token that is not in the text that heads know
    lines: list[str] = field(default_factory=list)

    async def answers(self, prompt: Sequence[int], plan: Plan, name: str) -> list[Answer]:
        """A session in every slot, every fourth one sampled. Each one tries heads for itself,
        because it bans a token.
        """
        verifier = self.cluster.processes["verifier-0"].address
        drafters = [it.address for it in self.cluster.processes.values() if isinstance(it.section, DrafterConfig)]
        contracts = [
            Contract(seed=number, max_tokens=TOKENS, temperature=float(number % 4 == 1), banned_ids=(self.unused,))
            for number in range(SESSIONS)
        ]
        return await asyncio.gather(
            *(
                decode(
                    verifier,
                    prompt,
                    contract,
                    plan=plan,
                    drafters=drafters,
                    session=f"{name}-{number}",
                    lease_ms=MAY_WAIT_MS,
                )
                for number, contract in enumerate(contracts)
            )
        )

    def preempted(self, name: str) -> dict[int, int]:
        """The sessions of that name that were preempted, and how long their texts were at the first time."""
        found = [match for line in reversed(self.lines) if (match := WAITS.search(line))]
        return {
            int(number): int(match[2])
            for match in found
            for stem, _, number in [match[1].rpartition("-")]
            if stem == name
        }

    async def preemptions(self) -> float:
        """How many the verifier's metrics count."""
        (page,) = [line.rpartition("metrics at ")[2].split()[0] for line in self.lines if "metrics at" in line]

        def read() -> str:
            with urllib.request.urlopen(page, timeout=10) as answer:
                return str(answer.read().decode())

        found = PREEMPTIONS.search(await asyncio.to_thread(read))
        assert found is not None
        return float(found[1])

    async def check(self, prompt: Sequence[int], plan: Plan) -> None:
        plain = await self.answers(prompt, OFF, "plain")
        drafted = await self.answers(prompt, plan, "drafted")
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
        assert sum(answer.accepted for answer in plain) == 0
        preempted = self.preempted("drafted")
        later = [steps_after(drafted[number], length - len(prompt)) for number, length in preempted.items()]
        print(f"accepted in the steps after a preemption: {later}")
        assert sum(map(sum, later)) > 10
        assert await self.preemptions() >= len(preempted) + len(self.preempted("plain"))


def steps_after(answer: Answer, length: int) -> list[int]:
    """The accepted drafts of each step that began with more tokens than those of an answer."""
    found, position = [], 0
    for report in answer.reports:
        if position > length:
            found.append(report.accepted)
        position += report.accepted + 1
    return found


@asynccontextmanager
async def bounded(text: Sequence[int], drafter: list[DrafterConfig], **verifier: Any) -> AsyncIterator[Bounded]:
    memory = least_memory(
        CpuEngine.load(TARGET, EngineSettings(dtype="float32", slots=1, rows=CONTEXT + SCRATCH, threads=1))
    )
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}),
        verifier=[
            VerifierConfig(
                model=TARGET,
                dtype="float32",
                slots=SESSIONS,
                context=CONTEXT,
                kv_memory=ByteSize(memory),
                metrics="127.0.0.1:0",
                **verifier,
            )
        ],
        drafter=drafter,
    )
    lines: list[str] = []
    async with LocalCluster(config, forward=lambda name, line: lines.append(f"{name}: {line}")) as cluster:
        await trust(cluster)
        yield Bounded(cluster, min({*range(1, 4096)} - {*text}), lines)


@pytest.mark.timeout(240)
async def test_a_kv_memory_bound_holds_with_heads_in_the_verifier(
    tokenizer: Tokenizer, prompts: list[str], tmp_path: Path
) -> None:
    prompt = tokenizer.encode(prompts[0]).ids
    text = greedy(TARGET, prompt, TOKENS)
    taught_heads("eagle", TARGET, tmp_path, text)
    async with bounded(text, [], heads=tmp_path) as verifier:
        await verifier.check(prompt, SPECULATE)


@pytest.mark.timeout(240)
async def test_a_kv_memory_bound_holds_with_heads_in_a_drafter(
    tokenizer: Tokenizer, prompts: list[str], tmp_path: Path
) -> None:
    prompt = tokenizer.encode(prompts[0]).ids
    text = greedy(TARGET, prompt, TOKENS)
    taught_heads("eagle-3", TARGET, tmp_path, text)
    drafter = DrafterConfig(model=TARGET, dtype="float32", heads=tmp_path, slots=SESSIONS)
    async with bounded(text, [drafter], features=tmp_path) as verifier:
        await verifier.check(prompt, ROUNDS)
