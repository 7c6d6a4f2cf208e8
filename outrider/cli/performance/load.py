"""Load generator for a router: several callers send prompts from a file concurrently, for a while."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from outrider.cli.performance.samples import Sample, timed
from outrider.core.session.contract import PolicyName
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.client import AsyncClient

Speculation = PolicyName | None  # None: the router's default


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt of messages, which the model's chat template makes a text of."""

    messages: tuple[Mapping[str, Any], ...]


Prompt = str | Sequence[int] | ChatPrompt


class ChatOptions(TypedDict, total=False):
    """The keyword of a request that has messages."""

    messages: tuple[Mapping[str, Any], ...]


def request_of(prompt: Prompt) -> tuple[str | Sequence[int] | None, ChatOptions]:
    """Return a request's prompt and its keywords."""
    return (None, {"messages": prompt.messages}) if isinstance(prompt, ChatPrompt) else (prompt, {})


@dataclass(frozen=True, slots=True)
class Load:
    """Callers in a closed loop: each pauses, sends a request, reads the answer to its end, and pauses again.

    Pauses are exponentially distributed, so that arrivals do not synchronize; their mean should be small compared to
    the duration of an answer. Requests and pauses follow from the seed, so a load can be repeated.
    """

    prompts: Sequence[Prompt]
    callers: int
    seconds: float  # duration of the measurement
    ramp_s: float  # duration of the load before the measurement
    max_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    think_s: float = 0.1  # mean of the pauses
    seed: int = 2024
    salts: int = 0  # number of token ids of which one is put before each prompt, so that no cached KV fits; 0: none
    repetition: int = 0  # of the same requests and pauses, with other token ids before the prompts


@dataclass(slots=True)
class LoadResult:
    """What a cluster generated under a load."""

    seconds: float
    tokens: int = 0  # tokens that arrived during the measurement
    samples: list[Sample] = field(default_factory=list)  # the complete answers, those of the ramp included

    @property
    def goodput(self) -> float:
        """Tokens per second, over all callers. A client receives tokens only once they are durable."""
        return self.tokens / self.seconds


async def apply_load(
    client: AsyncClient, load: Load, *, speculation: Speculation = None, depth: int | None = None, model: str = ""
) -> LoadResult:
    """Run the load and count its tokens. Request that still run at the end are cancelled.

    Raises the error of the first request that fails.
    """
    result = LoadResult(load.seconds)
    clock = asyncio.get_running_loop().time
    counted_from = clock() + load.ramp_s

    def count(tokens: int) -> None:
        if clock() >= counted_from:
            result.tokens += tokens

    async def call(number: int) -> None:
        dice, salting = random.Random(f"{load.seed}/{number}"), random.Random(f"{load.seed}/{number}/{load.repetition}")
        while True:
            await asyncio.sleep(dice.expovariate(1.0 / load.think_s))
            prompt = dice.choice(load.prompts)
            if load.salts and not isinstance(prompt, str | ChatPrompt):
                prompt = (salting.randrange(load.salts), *prompt)
            text, keywords = request_of(prompt)
            sample = await timed(
                client,
                text,
                count,
                **keywords,
                model=model,
                temperature=dice.choice(load.temperatures),
                seed=dice.getrandbits(32),
                max_tokens=load.max_tokens,
                ignore_eos=True,
                speculation=speculation,
                depth=depth,
            )
            result.samples.append(sample)

    try:
        async with asyncio.timeout_at(counted_from + load.seconds), asyncio.TaskGroup() as group:
            for number in range(load.callers):
                group.create_task(call(number))
    except TimeoutError:
        pass
    return result


def read_prompts(file: Path, ending: str = "") -> list[tuple[str, str]]:
    """Return (id, prompt) for each JSON line of a file whose id ends in `ending`. A line without an id gets its number.

    Raises ConfigError when there are no such lines, or when the file does not hold JSON lines with prompts.
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
