"""Has a target write texts for its drafter to learn from, many at a time, each token with the target's distribution."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.sampling.logprobs import stride
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.errors import ConfigError
from outrider.training.answers.answer_store import TOP, TargetAnswer
from outrider.training.answers.dialogue import Prompt

AT_ONCE = 32  # texts: a pass of 32 rows takes as long as a few passes of one row
MOST_ASKED = 128  # tokens of an instruction; a longer one is no instruction any more, and is left out
MOST_LEFT_OUT = 500  # such texts, one after another
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, in turns; instructions are drawn at 1, or all would be the same
LOOP, TIMES = 16, 3  # an answer ends that repeats its last tokens, at most LOOP of them, TIMES times

_ENTRY = np.dtype([("logprob", "<f4"), ("top", [("id", "<u4"), ("logprob", "<f4")], TOP)])


@dataclass(slots=True)
class _Text:
    """A text that is being written in a slot."""

    prompt: Prompt
    seed: int
    temperature: float  # of the answer
    sampler: Sampler
    tokens: list[int]
    read: int = 0  # tokens whose KV the engine has
    asked: slice = field(default_factory=lambda: slice(0, 0))
    answer: int = 0  # index of the answer's first token; 0: the instruction is being written
    rows: list[bytes] = field(default_factory=list)  # the target's distribution at each chosen token


class Teacher:
    """Writes texts with an engine, as many at once as that has slots."""

    def __init__(self, engine: Engine, prompts: Iterator[Prompt], *, first_seed: int, most: int) -> None:
        """`prompts`: one for each text; the seeds of the texts are consecutive numbers. `most`: tokens of an answer."""
        self._engine = engine
        self._prompts = prompts
        self._seed = first_seed
        self._most = most
        self._texts: list[_Text | None] = [self._begun() for _ in range(engine.slots)]

    def texts(self) -> Generator[TargetAnswer | None]:
        """Yield each text when it is complete, and None after each pass; until all prompts are answered.

        Raises ConfigError where the target asks for nothing, again and again.
        """
        left_out = 0
        while written := [(slot, text) for slot, text in enumerate(self._texts) if text is not None]:
            segments = [_segment(slot, text) for slot, text in written]
            draws = [text.sampler.draw(restricts=False) for _, text in written]
            logits = self._engine.sample(segments, draws)
            for row, (slot, text) in enumerate(written):
                text.read = len(text.tokens)
                if self._wrote(text, logits, row):
                    left_out = 0 if text.answer else left_out + 1
                    if text.answer:
                        yield _complete(text)
                    self._texts[slot] = self._begun()
            check_left_out(left_out)
            yield None

    def _begun(self) -> _Text | None:
        prompt, seed = next(self._prompts, None), self._seed
        if prompt is None:
            return None
        self._seed += 1
        tokens, temperature = [*prompt.before], TEMPERATURES[seed % len(TEMPERATURES)]
        text = _Text(prompt, seed, temperature, self._sampler(seed, 1.0, tokens), tokens)
        if prompt.between is None:
            self._begin_answer(text)
        return text

    def _sampler(self, seed: int, temperature: float, tokens: list[int]) -> Sampler:
        contract = Contract(seed=seed, max_tokens=self._most, temperature=temperature)
        return Sampler(contract, self._engine.vocabulary, tokens, len(tokens))

    def _begin_answer(self, text: _Text) -> None:
        text.asked = slice(len(text.prompt.before), len(text.tokens))
        text.tokens += text.prompt.between or ()
        text.answer = len(text.tokens)
        text.sampler = self._sampler(text.seed, text.temperature, text.tokens)

    def _wrote(self, text: _Text, logits: Logits, row: int) -> bool:
        """Add the token after a row of logits to a text. Return whether the text has ended; without an answer it is
        left out.
        """
        choice = logits.choice(row)
        token = (text.sampler.choose(logits.row(row)) if choice is None else choice).token
        ends = token in self._engine.eos_ids
        if ends and not text.answer:
            if len(text.tokens) == len(text.prompt.before):
                return True  # nothing was asked
            self._begin_answer(text)
            return False
        text.rows.append(logits.score([row], [token], TOP).logprobs)
        text.tokens.append(token)
        text.sampler.extend([token])
        if not text.answer:
            return len(text.rows) >= MOST_ASKED
        return ends or len(text.tokens) - text.answer >= self._most or _loops(text.tokens[text.answer :])


def check_left_out(count: int) -> None:
    """Raise ConfigError where `count` texts, one after another, had no instruction that ended: too many."""
    if count > MOST_LEFT_OUT:
        raise ConfigError("target: writes no instructions that end, so it is not tuned to chat; give --prompts")


def unrepeated(answer: Sequence[int]) -> int:
    """Return how many tokens of an answer are worth learning from: as far as `Teacher` would have written it."""
    return next((end for end in range(LOOP, len(answer), LOOP) if _loops(answer[:end])), len(answer))


def _segment(slot: int, text: _Text) -> Segment:
    where = np.arange(text.read, len(text.tokens))
    return Segment(slot, text.read, np.array(text.tokens[text.read :], np.int64), where, None, 1)


def _complete(text: _Text) -> TargetAnswer:
    assert len(text.rows[0]) == stride(TOP) == _ENTRY.itemsize
    top = np.frombuffer(b"".join(text.rows), _ENTRY)["top"]
    tokens = np.array(text.tokens, np.uint32)
    return TargetAnswer(
        tokens, text.asked, text.answer, text.temperature, text.seed, top["id"], top["logprob"].astype(np.float16)
    )


def _loops(answer: Sequence[int]) -> bool:
    """Return whether a text ends with the same few tokens again and again: from that a drafter learns nothing."""
    if len(answer) % LOOP or len(answer) < LOOP * TIMES:
        return False
    last = answer[-LOOP * TIMES :]
    return any(last[period:] == last[:-period] for period in range(1, LOOP + 1))
