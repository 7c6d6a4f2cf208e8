"""A router reduced to what exactness tests need: it opens Decode itself, so that it decides drafters and plans."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.core.session.contract import OFF, Contract, Plan, PlanOverlap, StepReport
from outrider.core.session.digest import EMPTY, extend
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.rpc.status import error_from_pb
from outrider.store.redis.client import connect
from outrider.v1 import drafter_pb2, types_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.tickets import Permit, TicketSigner
from outrider.wire.types import contract_to_pb, plan_to_pb, report_from_pb

SIGNERS: dict[str, TicketSigner] = {}  # by the address of a server whose cluster `trust` was given
# With overlap time costs nothing: drafters draft however fast the target is.
SPECULATE = Plan(version=1, depth=8, width=4, nodes=16, overlap=PlanOverlap.ALWAYS)
_names = itertools.count(1)


async def described(verifier: str) -> verifier_pb2.VerifierDescription:
    async with open_channel(verifier) as channel:
        return await VerifierStub(channel).Describe(types_pb2.DescribeRequest())


async def trust(cluster: LocalCluster) -> None:
    """Lists a ticket key in a running cluster's Redis, as a router does; it counts for the whole run."""
    signer = await listed_signer(cluster.redis_url)
    SIGNERS.update((process.address, signer) for process in cluster.processes.values())


async def listed_signer(redis_url: str) -> TicketSigner:
    signer = TicketSigner(time.time)
    async with aclosing(connect(redis_url)) as redis:
        await redis.zadd("outrider:{tickets}:keys", {signer.public_key: (time.time() + 86400) * 1000})
    return signer


@dataclass
class Answer:
    """One generation as the verifier reported it."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    digest: int = 0
    credited: Counter[str] = field(default_factory=Counter)  # accepted tokens, by drafter

    @property
    def accepted(self) -> int:
        return sum(report.accepted for report in self.reports)


async def decode(
    verifier: str,
    prompt: Sequence[int],
    contract: Contract,
    *,
    plan: Plan = SPECULATE,
    drafters: Sequence[str] = (),
    each: Callable[[Answer], Awaitable[Plan | None]] | None = None,
    session: str | None = None,
    pace: float = 0.0,
    upstream: str | None = None,
    lease_ms: int = 10_000,
) -> Answer:
    """Runs one generation. `each` receives every commit and may answer with a new plan.

    With a `pace`, the log lags: the window is one path of the plan, and once it is full, drafters have that many
    seconds before all of it is acknowledged, and 0.4 s until all of them have joined. `lease_ms`: how long it may be
    silent, for it sends no heartbeats.
    """
    session = session or f"exact-{next(_names)}"
    answer = Answer()
    durable, window, joined = len(prompt), plan.depth + 1 if pace else 64, False
    commands: asyncio.Queue[verifier_pb2.DecodeRequest | None] = asyncio.Queue()

    async with open_channel(verifier) as channel:
        described = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
        start = verifier_pb2.DecodeStart(
            session_id=session,
            epoch=1,
            model=described.model,
            tokenizer_digest=described.tokenizer_digest,
            tokens=prompt,
            digest=extend(EMPTY, prompt),
            answer_position=len(prompt),
            contract=contract_to_pb(contract),
            plan=plan_to_pb(plan),
            window=window,
            lease_ms=lease_ms,
            handle=1,
        )
        commands.put_nowait(verifier_pb2.DecodeRequest(start=start))

        async def requests() -> AsyncIterator[verifier_pb2.DecodeRequest]:
            while command := await commands.get():
                yield command

        if plan is not OFF:
            await asyncio.gather(*(attach(drafter, session, verifier, upstream) for drafter in drafters))
        async for response in VerifierStub(channel).Decode(requests()):
            for commit in response.commits:
                assert commit.position == len(prompt) + len(answer.tokens)
                answer.tokens += commit.tokens
                answer.gaps += commit.gaps
                answer.digest = commit.digest
                answer.credited.update({each.drafter_id: each.accepted for each in commit.contributions})
                answer.reports.append(report_from_pb(commit.report))
                joined = joined or answer.reports[-1].drafters == len(drafters)
                length = commit.position + len(commit.tokens)
                if not pace or length == durable + window:
                    await asyncio.sleep(pace if joined or not pace else max(pace, 0.4))
                    durable = length
                    commands.put_nowait(verifier_pb2.DecodeRequest(acknowledged=[1], durable=[durable]))
                if each and (changed := await each(answer)):
                    change = verifier_pb2.PlanChange(handle=1, plan=plan_to_pb(changed))
                    commands.put_nowait(verifier_pb2.DecodeRequest(plans=[change]))
            for ended in response.ended:
                if ended.HasField("error"):
                    raise error_from_pb(ended.error)
                commands.put_nowait(None)
    assert answer.digest == extend(EMPTY, [*prompt, *answer.tokens])
    return answer


async def detach(drafter: str, session: str) -> None:
    async with open_channel(drafter) as channel:
        await DrafterStub(channel).Detach(drafter_pb2.DetachRequest(session_id=session, epoch=1))


async def attach(drafter: str, session: str, verifier: str, upstream: str | None = None) -> None:
    """Attaches a drafter to a session; `upstream`: another way to the verifier than its own address."""
    async with open_channel(drafter) as channel:
        described = await DrafterStub(channel).Describe(types_pb2.DescribeRequest())
        signed = await ticket(verifier, session, described.worker_id)
        request = drafter_pb2.AttachRequest(session_id=session, epoch=1, upstream=upstream or verifier, ticket=signed)
        await DrafterStub(channel).Attach(request)


async def ticket(verifier: str, session: str, drafter_id: str, epoch: int = 1) -> bytes:
    async with open_channel(verifier) as channel:
        described = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
    return SIGNERS[verifier].sign(Permit(session, "", drafter_id, described.worker_id, epoch))
