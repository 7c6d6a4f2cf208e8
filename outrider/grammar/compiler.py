"""Compiles callers' grammars for one model's vocabulary, each in a process of its own, and bounds what they take.

A compiled grammar is kept for its tenant, because drafters, forks and resumed sessions need it again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.grammar.connection import Answer, GrammarConnection
from outrider.grammar.place import GrammarPlace, Patience
from outrider.grammar.processes import GrammarProcesses, TokenizerJson

KEPT_PROCESSES = 32  # compiled grammars that no session follows
KEPT_BYTES = 256 << 20  # bytes that these take at most
FIELD = "grammar"  # of a request
KEPT_REFUSALS = 256  # of grammars that cannot be compiled
MAX_PROCESSES = 256
MAX_BYTES = 512 << 20  # of all compiled grammars, from which no more are taken on
TENANT_SHARE = 0.5  # one tenant's share of what others leave of both
MAX_COMPILING = 64  # grammars of a tenant that are compiled, one after the other

_Key = tuple[str, bytes]  # tenant, and digest of the grammar


class GrammarCompiler:
    """Grammars for the vocabulary of one checkpoint. It belongs to one thread, and there to one event loop, if any."""

    def __init__(
        self,
        tokenizer: TokenizerJson,
        vocabulary: int,
        eos_ids: Sequence[int],
        *,
        patience: Patience | None = None,
        eager: bool = False,
    ) -> None:
        """`tokenizer`: see `TokenizerJson`; `vocabulary`: ids that can be chosen; `eos_ids`: those that end a text;
        `patience`: with which places wait for their process; None: as long as it takes; `eager`: see `GrammarPlace`.

        The tokenizer is read at the first use.
        """
        self._vocabulary = vocabulary
        self._patience = patience
        self._eager = eager
        self._processes = GrammarProcesses(tokenizer, vocabulary, eos_ids)
        self._compiled: OrderedDict[_Key, _Compiled] = OrderedDict()  # those used last are last
        self._refused: OrderedDict[_Key, str] = OrderedDict()  # what is wrong; an error would keep its callers' frames
        self._queues: dict[str, list[_Compiled]] = {}  # by tenant: the one that is compiled, and those that wait

    async def check(self, grammar: Grammar, tenant: str = "") -> None:
        """Raise InvalidRequest for a tenant's grammar that cannot be followed, Overloaded where its grammars take too
        much already, ConfigError where llguidance is missing, Unavailable where its process died."""
        await self._done(self._find(grammar, tenant))

    async def open(self, grammar: Grammar, answer: Sequence[int] = (), tenant: str = "") -> GrammarPlace:
        """Return the place in a tenant's grammar behind an answer's tokens. Raises as `check`."""
        compiled = self._find(grammar, tenant)
        compiled.places += 1  # it is kept meanwhile
        try:
            await self._done(compiled)
        finally:
            compiled.places -= 1
        return self._place(compiled, answer)

    def start(self, grammar: Grammar, answer: Sequence[int] = (), tenant: str = "") -> GrammarPlace:
        """Return what `open` does; the thread waits meanwhile."""
        compiled = self._find(grammar, tenant)
        compiled.connection.wait(None, lambda: compiled.ready)
        if compiled.failure is not None:
            raise compiled.failure
        return self._place(compiled, answer)

    def known(self, grammar: Grammar, answer: Sequence[int] = (), tenant: str = "") -> GrammarPlace | None:
        """Return a lenient place for a drafter without blocking; None while compiling or if compilation failed."""
        try:
            compiled = self._find(grammar, tenant)
        except OutriderError:
            return None
        if not compiled.ready or compiled.failure is not None:
            return None
        return self._place(compiled, answer, lenient=True)

    def close(self) -> None:
        """End all processes."""
        for compiled in [*self._compiled.values()]:
            compiled.connection.close()
        self._compiled.clear()
        self._processes.close()

    @property
    def usage(self) -> GrammarUsage:
        """What grammars take now."""
        return GrammarUsage(len(self._compiled), sum(it.bytes for it in self._compiled.values()))

    def _find(self, grammar: Grammar, tenant: str) -> _Compiled:
        """Return a grammar's process, which may be compiling it still. Raises why there is none."""
        key = tenant, _digest(grammar)
        if (problem := self._refused.get(key)) is not None:
            self._refused.move_to_end(key)
            raise InvalidRequest(FIELD, problem)
        found = self._compiled.get(key)
        if found is not None and found.connection.failure is None:
            self._compiled.move_to_end(key)
            return found
        if len(self._queues.get(tenant, ())) >= MAX_COMPILING:
            raise Overloaded(f"{MAX_COMPILING} of your grammars wait to be compiled; retry in a second")
        self._make_room(tenant)
        found = self._compiled[key] = _Compiled(key, self._processes.start())
        self._compiled.move_to_end(key)
        found.compile = lambda: found.connection.send(
            lambda answer: self._on_compiled(found, answer),
            "compile",
            grammar.kind,
            grammar.text,
            grammar.reasoning,
        )
        queue = self._queues.setdefault(tenant, [])
        queue.append(found)
        if len(queue) == 1:
            found.compile()
        return found

    def _on_compiled(self, compiled: _Compiled, answer: Answer) -> None:
        key, compiled.failure, compiled.ready = compiled.key, answer.failure, True
        if isinstance(answer.failure, InvalidRequest):
            self._refused[key] = str(answer.failure).removeprefix(f"{FIELD}: ")
            if len(self._refused) > KEPT_REFUSALS:
                self._refused.popitem(last=False)
        if answer.failure is not None:
            compiled.connection.close()
            if self._compiled.get(key) is compiled:
                del self._compiled[key]
        queue = self._queues[key[0]]
        queue.remove(compiled)
        if queue:
            queue[0].compile()
        else:
            del self._queues[key[0]]
        for waiter in compiled.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _make_room(self, tenant: str) -> None:
        """End processes that no session needs, the least recently used first. Raises Overloaded if others take all."""
        for key, compiled in [*self._compiled.items()]:
            if compiled.connection.failure is not None:
                del self._compiled[key]
        unused = [it for it in self._compiled.values() if it.ready and not it.places]
        kept_bytes = sum(it.bytes for it in unused)
        while unused and (len(unused) >= KEPT_PROCESSES or kept_bytes > KEPT_BYTES):
            oldest = unused.pop(0)
            kept_bytes -= oldest.bytes
            oldest.connection.close()
            del self._compiled[oldest.key]
        used = [it for it in self._compiled.values() if not it.ready or it.places]
        own = [it for it in used if it.key[0] == tenant]
        processes = MAX_PROCESSES - len(used) + len(own)
        room = MAX_BYTES - sum(it.bytes for it in used) + sum(it.bytes for it in own)
        if len(own) >= TENANT_SHARE * processes or sum(it.bytes for it in own) >= TENANT_SHARE * room:
            raise Overloaded("the grammars of your running answers take all that there is for them; retry in a second")

    async def _done(self, compiled: _Compiled) -> None:
        if not compiled.ready:
            waiter = asyncio.get_running_loop().create_future()
            compiled.waiters.append(waiter)
            await waiter
        if compiled.failure is not None:
            raise compiled.failure

    def _place(self, compiled: _Compiled, answer: Sequence[int], *, lenient: bool = False) -> GrammarPlace:
        compiled.places += 1
        compiled.places_begun += 1
        return GrammarPlace(
            compiled.connection,
            compiled.places_begun,
            self._vocabulary,
            self._patience,
            compiled.leave,
            answer,
            lenient=lenient,
            eager=self._eager,
        )


class GrammarUsage(NamedTuple):
    """What the grammars of a server take."""

    processes: int
    bytes: int


class _Compiled:
    """A grammar's process."""

    compile: Callable[[], None]  # sends it the grammar

    def __init__(self, key: _Key, connection: GrammarConnection) -> None:
        self.key = key
        self.connection = connection
        self.ready = False  # the grammar is compiled, or `failure` says why not
        self.failure: OutriderError | None = None
        self.places = 0  # of sessions that follow it
        self.places_begun = 0
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def bytes(self) -> int:
        """The memory that the grammar takes."""
        return self.connection.memory_kib << 10

    def leave(self) -> None:
        """One session less follows it."""
        self.places -= 1


def _digest(grammar: Grammar) -> bytes:
    text = f"{grammar.kind} {grammar.reasoning} {grammar.text}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
