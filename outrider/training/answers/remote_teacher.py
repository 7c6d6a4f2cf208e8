"""Has a cluster at work write what its target's drafter learns from: a client of its router."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator, Iterator
from pathlib import Path

import numpy as np

from outrider.client import AsyncClient
from outrider.client import Generation as Said
from outrider.core.session.contract import MAX_LOGPROBS, FinishReason
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digests
from outrider.errors import ConfigError, OutriderError
from outrider.training.answers.answer_store import TOP, TargetAnswer
from outrider.training.answers.dialogue import Prompt
from outrider.training.answers.teacher import AT_ONCE, MOST_ASKED, TEMPERATURES, check_left_out, unrepeated


class RemoteTeacher:
    """Writes texts as `Teacher` does, by requests to a router. With each token come the target's 20 likeliest."""

    def __init__(self, address: str, target: Path, prompts: Iterator[Prompt], *, first_seed: int, most: int) -> None:
        """`target`: its checkpoint or a folder with its tokenizer; the others are as for `Teacher`."""
        self._address = address
        self._digests = read_tokenizer_digests(target)
        self._prompts = prompts
        self._seed = first_seed
        self._most = most

    def texts(self) -> Generator[TargetAnswer | None]:
        """Yield each text when it is complete, and None once a second; until all prompts are answered.

        Raises ConfigError where no cluster answers, or none that serves the target, and where the target asks for
        nothing, again and again.
        """
        left_out = 0
        with asyncio.Runner() as runner:
            client, writing = AsyncClient(self._address), set[asyncio.Task[TargetAnswer | None]]()
            try:
                model = runner.run(self._model(client))
                while self._begin(runner, client, model, writing):
                    waiting = asyncio.wait(writing, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                    for task in runner.run(waiting)[0]:
                        text = task.result()
                        writing.remove(task)
                        left_out = left_out + 1 if text is None else 0
                        yield text
                    check_left_out(left_out)
                    yield None
            except ConfigError:
                raise
            except OutriderError as error:
                raise ConfigError(f"teacher: {self._address}: {error}") from None
            finally:
                runner.run(_end(client, writing))

    def _begin(
        self, runner: asyncio.Runner, client: AsyncClient, model: str, writing: set[asyncio.Task[TargetAnswer | None]]
    ) -> bool:
        """Begin as many texts as are written at once. Return whether any is being written."""
        while len(writing) < AT_ONCE and (prompt := next(self._prompts, None)) is not None:
            writing.add(runner.get_loop().create_task(self._text(client, model, prompt, self._seed)))
            self._seed += 1
        return bool(writing)

    async def _model(self, client: AsyncClient) -> str:
        """Return the name of the model that has the target's tokenizer."""
        served = await client.models()
        names = [it.name for it in served if it.tokenizer_digest in self._digests]
        if len(names) != 1:
            all_of_them = ", ".join(names or (it.name for it in served))
            raise ConfigError(
                f"teacher: {self._address} serves {all_of_them or 'no model'}, and has to serve one with the target's "
                "tokenizer"
            )
        return names[0]

    async def _text(self, client: AsyncClient, model: str, prompt: Prompt, seed: int) -> TargetAnswer | None:
        """Write a text. Return None if the target ended its instruction at once, or never."""

        async def say(tokens: list[int], temperature: float, most: int) -> Said:
            return await client.generate(
                tokens, model=model, seed=seed, temperature=temperature, max_tokens=most, logprobs=MAX_LOGPROBS
            )

        tokens, rows = [*prompt.before], list[tuple[tuple[int, float], ...]]()
        if prompt.between is not None:
            instruction = await say(tokens, 1.0, MOST_ASKED)
            asked = instruction.token_ids[:-1]  # without the end of a turn, which `between` has
            if instruction.finish_reason is not FinishReason.STOP or not asked:
                return None
            tokens += (*asked, *prompt.between)
            rows += (it.top for it in instruction.logprobs[:-1])
        answer, temperature = len(tokens), TEMPERATURES[seed % len(TEMPERATURES)]
        said = await say(tokens, temperature, self._most)
        count = unrepeated(said.token_ids)
        tokens += said.token_ids[:count]
        rows += (it.top for it in said.logprobs[:count])
        ids, logprobs = np.zeros((len(rows), TOP), np.uint32), np.full((len(rows), TOP), -np.inf, np.float16)
        for row, top in enumerate(rows):
            ids[row, : len(top)], logprobs[row, : len(top)] = zip(*top, strict=True)
        first = len(prompt.before)
        chosen = slice(first, first if prompt.between is None else answer - len(prompt.between))
        return TargetAnswer(np.array(tokens, np.uint32), chosen, answer, temperature, seed, ids, logprobs)


async def _end(client: AsyncClient, writing: Collection[asyncio.Task[TargetAnswer | None]]) -> None:
    """End what is being written, and the connection."""
    for task in writing:
        task.cancel()
    await asyncio.gather(*writing, return_exceptions=True)
    await client.close()
