"""Load on a router: prompts from a file, asked for by several callers at once, for a while."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.samples import Sample, timed
from outrider.core.contract import PolicyName
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.client import AsyncClient

Speculation = PolicyName | None  # None: the router's own


@dataclass(frozen=True, slots=True)
class Load:
    """Callers in a closed loop: each thinks for a while, asks, reads the answer to its end, and thinks again.

    Thinking times are exponential, so that arrivals do not fall into step; the mean should be small against an answer.
    What is asked and when follows from the seed: the same load can be put on again.
    """

    prompts: Sequence[str | Sequence[int]]
    callers: int
    seconds: float  # that tokens are counted
    ramp_s: float  # before that
    max_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    think_s: float = 0.1
    seed: int = 2024
    salts: int = 0  # token ids that every prompt is begun with one of, so that no KV of earlier ones fits; 0: none


@dataclass(slots=True)
class Carried:
    """What a cluster made of a load."""

    seconds: float
    tokens: int = 0  # that arrived while they were counted
    samples: list[Sample] = field(default_factory=list)  # the answers that ended, ramp included

    @property
    def goodput(self) -> float:
        """Tokens per second, over all callers. A client sees none before it is durable."""
        return self.tokens / self.seconds


async def carry(
    client: AsyncClient, load: Load, *, speculation: Speculation = None, depth: int | None = None, model: str = ""
) -> Carried:
    """Puts the load on and counts. What still runs at the end is cancelled. A request that fails fails it all."""
    carried = Carried(load.seconds)
    clock = asyncio.get_running_loop().time
    counted_from = clock() + load.ramp_s

    def heard(tokens: int) -> None:
        if clock() >= counted_from:
            carried.tokens += tokens

    async def call(number: int) -> None:
        dice = random.Random(f"{load.seed}/{number}")
        while True:
            await asyncio.sleep(dice.expovariate(1.0 / load.think_s))
            prompt = dice.choice(load.prompts)
            if load.salts and not isinstance(prompt, str):
                prompt = (dice.randrange(load.salts), *prompt)
            sample = await timed(
                client,
                prompt,
                heard,
                model=model,
                temperature=dice.choice(load.temperatures),
                seed=dice.getrandbits(32),
                max_tokens=load.max_tokens,
                ignore_eos=True,
                speculation=speculation,
                depth=depth,
            )
            carried.samples.append(sample)

    try:
        async with asyncio.timeout_at(counted_from + load.seconds), asyncio.TaskGroup() as group:
            for number in range(load.callers):
                group.create_task(call(number))
    except TimeoutError:
        pass
    return carried


def read_prompts(file: Path, ending: str = "") -> list[tuple[str, str]]:
    """(id, prompt) of each of a file's JSON lines whose id ends in `ending`. A line without an id gets its number.

    Raises ConfigError when there are none, or the file is not such a file.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        entries = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
        prompts = [(str(entry.get("id", number)), entry["prompt"]) for number, entry in entries]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f'{file}: must hold JSON lines with a prompt each: {{"prompt": "..."}}') from None
    chosen = [(name, prompt) for name, prompt in prompts if name.endswith(ending)]
    if not chosen or not all(isinstance(prompt, str) and prompt for _, prompt in chosen):
        raise ConfigError(f"{file}: holds {'an empty prompt' if chosen else 'no prompt'}")
    return chosen
