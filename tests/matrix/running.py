"""Runs a cell: the answers with speculation, whatever befalls the cluster, and those of plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import outrider
from outrider.core.session.contract import PolicyName
from outrider.errors import OutriderError
from tests.e2e.test_grammars import SCHEMA
from tests.e2e.test_tools import TOOLS
from tests.matrix.cells import Cell
from tests.matrix.clusters import MatrixCluster

TIMEOUT_S = 90.0  # of one answer
SAMPLING: dict[str, dict[str, Any]] = {
    "T 0": {"temperature": 0.0},
    "T 1": {"temperature": 1.0},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"temperature": 0.7, "logit_bias": {16: 2.0, 300: -100.0, 1200: 4.0}},
}
ANSWERS: dict[str, dict[str, Any]] = {
    "free": {},
    "JSON schema": {"schema": SCHEMA},
    "regex": {"regex": r"(north|south|east|west), [0-9]{2} miles( and [a-z]{3,9}){2,8}\."},
    "tool call": {"tools": TOOLS, "tool_choice": "required"},
}
MODELS = {"no adapter": ("target",), "adapter A": ("a",), "A and B in one batch": ("a", "b", "target")}
ASKING: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 3},
    "stop strings": {"stop": ["\n\n", "rns", " and s"]},
    "min_tokens": {"min_tokens": 30, "stop": ["e", "1"]},
    "n = 3": {},
}
CHOICES = {"n = 3": 3}
POLICIES: dict[str, PolicyName] = {"none": "fixed", "suffix": "fixed", "heads": "fixed"}
WAITING: PolicyName = "rounds"  # of the others: it waits for drafts
MAX_TOKENS = 120


class Asked(NamedTuple):
    """One answer of a cell."""

    model: str
    choice: int


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    problem: str  # empty: all was as with plain decoding
    tokens: int = 0
    accepted: int = 0  # drafted tokens
    struck: bool = False  # a server was killed, and a session that had begun went on elsewhere


async def run(cell: Cell, cluster: MatrixCluster, prompt: str, seed: int = 5) -> Outcome:
    """The cell's outcome. What it killed runs again afterwards."""
    terms = {"seed": seed, "max_tokens": MAX_TOKENS, "timeout": TIMEOUT_S}
    terms |= SAMPLING[cell.sampling] | ANSWERS[cell.answer] | ASKING[cell.asking]
    answers = [Asked(model, choice) for model in MODELS[cell.adapting] for choice in range(CHOICES.get(cell.asking, 1))]
    run, problem, ours = _Run(cell, cluster, prompt, terms), "", list[outrider.Generation]()
    try:
        async with cluster.client() as client:
            plain = [
                await client.generate(
                    **_prompt(cell, prompt), model=it.model, choice=it.choice, speculation="off", **terms
                )
                for it in answers
            ]
        ours = await run.answers(answers)
        problem = "; ".join(filter(None, map(difference, answers, plain, ours)))
    except OutriderError as error:
        problem = f"{type(error).__name__}: {error}"
    if ended := await cluster.restore():
        problem = f"{problem}; ended: {', '.join(ended)}"
    accepted = sum(one.usage.accepted for one in ours)
    return Outcome(cell, problem, sum(len(one.token_ids) for one in ours), accepted, run.struck)


class _Run:
    """The answers with speculation."""

    def __init__(self, cell: Cell, cluster: MatrixCluster, prompt: str, terms: dict[str, Any]) -> None:
        self.struck = False
        self._cell = cell
        self._cluster = cluster
        self._prompt = prompt
        self._terms = terms | {"speculation": POLICIES.get(cell.drafting, WAITING)}

    async def answers(self, asked: Sequence[Asked]) -> list[outrider.Generation]:
        """All of them at once."""
        async with self._cluster.client() as client:
            running = (self._answer(client, it, first=not i) for i, it in enumerate(asked))
            results = await asyncio.gather(*running, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, outrider.Generation)]

    async def _answer(self, client: outrider.AsyncClient, it: Asked, *, first: bool) -> outrider.Generation:
        """One answer. While the first one runs, the cell's event befalls the cluster."""
        terms = self._terms | {"model": it.model, "choice": it.choice}
        if self._cell.event == "forked":
            before = await client.generate(**_prompt(self._cell, self._prompt, another=True), **terms)
            terms |= {"session": before.session_id, "whole_history": True}
        stream = client.stream(**_prompt(self._cell, self._prompt), **terms)
        strikes = first and self._cell.event in ("verifier killed", "router killed")
        waiting = strikes
        async for chunk in stream:
            if waiting and chunk.token_ids:
                waiting = False
                await self._strike(client, stream.session_id)
        if strikes:
            self.struck = (await client.get_session(stream.session_id)).epoch > 1
        if self._cell.event == "forked" and stream.result.forked_from != terms["session"]:
            raise OutriderError("the session did not fork")
        return stream.result

    async def _strike(self, client: outrider.AsyncClient, session: str) -> None:
        if self._cell.event == "router killed":
            self._cluster.kill_router()
        else:
            self._cluster.kill_verifier((await client.get_session(session)).verifier)


def _prompt(cell: Cell, prompt: str, *, another: bool = False) -> dict[str, Any]:
    """The question. `another` one begins like it."""
    text = prompt + (" Another end" if another else "")
    return {"messages": [{"role": "user", "content": text}]} if cell.answer == "tool call" else {"prompt": text}


def difference(asked: Asked, plain: outrider.Generation, ours: outrider.Generation) -> str:
    """Where an answer is not that of plain decoding; empty: nowhere."""
    for what in ("token_ids", "text", "finish_reason", "logprobs"):
        if (expected := getattr(plain, what)) != (found := getattr(ours, what)):
            return f"{asked.model}, choice {asked.choice}: {what}: {found!r} instead of {expected!r}"
    return ""
