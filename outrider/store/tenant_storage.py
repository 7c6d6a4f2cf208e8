"""What each tenant keeps in Redis, counted and bounded, so that one tenant cannot fill it for all.

    outrider:{usage:H}:ends    sorted set: the tenant's sessions, by when they expire
    outrider:{usage:H}:bytes   hash: what each takes
    outrider:{usage:H}:claims  sorted set: the idempotency keys that its requests hold, by when they expire

A generation is counted before it begins, with all that it may write, and again when it has ended, with what it wrote:
the path of a commit does nothing for it. A generation that runs for longer than `session_ttl_s` is not counted in
between.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import Any

from redis.asyncio import RedisCluster

from outrider.core.sampling.logprobs import stride
from outrider.errors import Overloaded
from outrider.store.records import SessionTurn
from outrider.store.redis.client import Client, redis_errors

SESSION_BYTES = 2048  # of a session's record and the keys of its log
TOKEN_BYTES = 4  # of a token of a prompt
ANSWER_TOKEN_BYTES = 40  # of a token of an answer, where each is an entry of the log
CLAIM_BYTES = 512  # of the claim of an idempotency key, and of what counts it
FULL = 0.9  # share of Redis' memory from which on no session begins
SHARE = 0.5  # share of Redis' memory that one tenant may take, unless the configuration has it otherwise
RETRY_S = 5.0


def generation_bytes(prompt_tokens: int, turn: SessionTurn, answer_tokens: int | None = None) -> int:
    """Return what a generation takes in Redis, roughly; without `answer_tokens`, with all that it may write."""
    contract = turn.contract
    answer = contract.max_tokens if answer_tokens is None else answer_tokens
    logprobs = 0 if contract.logprobs is None else stride(contract.logprobs)
    callers = (  # what a caller may make as long as he likes, as the record has it
        turn.stops,
        contract.stop_ids,
        contract.logit_bias,
        contract.allowed_ids,
        contract.banned_ids,
        contract.grammar and contract.grammar.text,
    )
    terms = len(json.dumps(callers))
    return SESSION_BYTES + terms + TOKEN_BYTES * prompt_tokens + (ANSWER_TOKEN_BYTES + logprobs) * answer


class TenantStorage:
    """Counts and bounds what tenants keep in Redis."""

    def __init__(self, redis: Client, ttl_s: float, *, sessions: int | None, size: int | None) -> None:
        """`sessions` and `size`: the most sessions and bytes of one tenant; None: no limit, and a share of what Redis
        may hold."""
        self._redis = redis
        self._ttl_ms = round(ttl_s * 1000)
        self._sessions = sessions
        self._size = size
        self._script = redis.register_script(files("outrider.store").joinpath("scripts/reserve.lua").read_text("utf-8"))
        self._used, self._room = 0, 0  # bytes; 0: Redis has no limit

    async def measure(self) -> None:
        """Read how full Redis is. Raises Unavailable."""
        with redis_errors(self._redis):
            if isinstance(self._redis, RedisCluster):
                found: Any = await self._redis.info("memory", target_nodes=RedisCluster.PRIMARIES)
                nodes = list(found.values()) if "used_memory" not in found else [found]
            else:
                nodes = [await self._redis.info("memory")]
        fullest = max(nodes, key=lambda node: node["used_memory"] / (node["maxmemory"] or float("inf")))
        self._used, self._room = int(fullest["used_memory"]), int(fullest["maxmemory"])

    @property
    def bounded(self) -> bool:
        """Whether there is anything to count for."""
        return bool(self._sessions or self._most_bytes)

    async def reserve(
        self, tenant: str, session_id: str, generation: int, size: int, *, new: bool, claim: str = ""
    ) -> None:
        """Count a generation that is about to begin; 0 is a session without one. `new`: its session is new. `claim`:
        name of the idempotency key that its request is about to claim, which counts as long as it is held, also when
        the session is closed.

        Raises Overloaded where the tenant would have too much, or where Redis is almost full and the session is new:
        what runs can go on then.
        """
        if new and self._room and self._used > FULL * self._room:
            raise Overloaded(
                f"Redis is almost full, so no session begins; retry in {RETRY_S:.0f} s (operators: raise its maxmemory "
                "or lower session_ttl_s)",
                retry_after=RETRY_S,
            )
        if not self.bounded:
            return
        most = [self._sessions or "", self._most_bytes or ""]
        what, count = await self._run(tenant, session_id, generation, size, *most, claim)
        if what == b"sessions":
            raise Overloaded(
                f"this tenant has {count} sessions (tenant_stored_sessions); close some, or wait until some expire",
                retry_after=RETRY_S,
            )
        if what == b"bytes":
            raise Overloaded(
                f"this tenant's sessions take {count} bytes of at most {self._most_bytes} (tenant_stored_bytes); close "
                "some, ask for fewer tokens, or retry when some have expired",
                retry_after=RETRY_S,
            )

    async def settle(self, tenant: str, session_id: str, generation: int, size: int) -> None:
        """Count a generation that has ended, with what it has written."""
        await self._run(tenant, session_id, generation, size, "", "", "")

    async def forget(self, tenant: str, session_id: str) -> None:
        """Drop a session that was closed."""
        if self.bounded:
            await self._run(tenant, session_id, 0, "", "", "", "")

    @property
    def _most_bytes(self) -> int | None:
        """The most bytes of a tenant."""
        return self._size if self._size is not None else round(SHARE * self._room) or None

    async def _run(
        self, tenant: str, session_id: str, generation: int, size: int | str, *bounds_and_claim: int | str
    ) -> tuple[bytes, int]:
        tag = f"outrider:{{usage:{hashlib.sha256(tenant.encode()).hexdigest()[:32]}}}"
        with redis_errors(self._redis):
            what, count = await self._script(
                keys=[f"{tag}:ends", f"{tag}:bytes", f"{tag}:claims"],
                args=[session_id, generation, size, self._ttl_ms, *bounds_and_claim, CLAIM_BYTES],
            )
        return what, int(count)
