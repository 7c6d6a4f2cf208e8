"""What a model of `transformers` can do, tried when it loads and not guessed from its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.batch import Segment
from outrider.engine.engine import Engine
from outrider.engine.group import ALONE, TensorGroup
from outrider.engine.hugging_face import Masks, TransformersEngine
from outrider.engine.plain import PlainEngine, Reading
from outrider.engine.pretrained import Pretrained
from outrider.errors import CheckpointError

# How far logits may be off those of one pass over the text, in parts of these logits' deviation. What a wrong mask does
# is much more; what rounding does, much less.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.1, "int4": 0.1}
SANE = 0.5  # where float32 has shown that the way is right: rounding may send a row to another expert
WINDOW = 6  # tokens back that layers with a window see in a trial: fewer than its texts have
LONG, SHORT = 11, 4  # tokens of its two texts
PARENTS = (-1, 0, 1, -1, 3)  # of its tree: two branches
ROWS = 32

Text = NDArray[np.int64]


class Way(NamedTuple):
    """How a model is run: with trees, or plainly."""

    masks: Masks | None
    reading: Reading | None = None
    reason: str = ""  # why it takes no trees

    def build(
        self, pretrained: Pretrained, *, slots: int, rows: int, threads: int, group: TensorGroup
    ) -> TransformersEngine | PlainEngine:
        """The engine."""
        if self.masks is not None:
            return TransformersEngine(
                pretrained, masks=self.masks, slots=slots, rows=rows, threads=threads, group=group
            )
        assert self.reading is not None
        return PlainEngine(
            pretrained, reason=self.reason, reading=self.reading, slots=slots, rows=rows, threads=threads, group=group
        )


# The best first.
WAYS = (Way("asked"), Way("given"), Way(None, "chunks"), Way(None, "one by one"), Way(None, "anew"))


class _Failed(Exception):
    """The model said something else than in one pass over the text."""


def find_way(pretrained: Pretrained, *, threads: int, after: Way | None = None) -> Way:
    """The first way that the model passes its trial with. `after`: one that was found on the same model in another
    precision; better ones are not tried. All ranks of a group find the same one: all of them have the logits here.
    Raises CheckpointError when there is none.
    """
    tolerance = TOLERANCE[pretrained.dtype] if after is None else SANE
    ways = [way for way in WAYS if after is None or not _better(way, after)]
    reason = after.reason if after is not None else ""
    last = ""
    for way in ways:
        way = way._replace(reason=reason if way.masks is None else "")
        build = partial(way.build, pretrained, slots=2, rows=ROWS, threads=threads, group=ALONE)
        try:
            with torch.inference_mode(), pretrained.windows_of(WINDOW):
                trial = _Trial(pretrained, tolerance)
                (trial.of_chains if way.masks is None else trial.of_trees)(build)
            return way
        except Exception as error:  # whatever a model raises that was not made for this
            last = _reason(error)
            reason = reason or last
    raise CheckpointError(f"this model cannot be served, not even without speculation: {last}")


def _better(way: Way, found: Way) -> bool:
    order = [(way.masks, way.reading) for way in WAYS]
    return order.index((way.masks, way.reading)) < order.index((found.masks, found.reading))


class _Trial:
    def __init__(self, pretrained: Pretrained, tolerance: float) -> None:
        self._pretrained = pretrained
        self._tolerance = tolerance
        random = np.random.default_rng(1)
        avoided = getattr(pretrained.model.config.get_text_config(), "pad_token_id", None)
        usual = np.array([token for token in range(min(pretrained.vocabulary, 4096)) if token != avoided])
        self._long, self._short = (random.choice(usual, count) for count in (LONG, SHORT))
        self._nodes: Text = random.choice(usual, len(PARENTS))
        self._after: Text = random.choice(usual, 3)

    def of_trees(self, build: Callable[[], Engine]) -> None:
        """Two sessions in one call, a prompt in two chunks, a tree behind it, its second branch kept, a copy."""
        paths = [_path(node) for node in range(len(PARENTS))]
        texts = [np.concatenate([self._long, self._nodes[path]]) for path in paths]
        kept = np.concatenate([texts[4], self._after])
        expected = [self._expect(text)[-1:] for text in texts]
        chunk = self._expect(self._long)[6:]
        others = self._expect(np.concatenate([self._short, self._after]))
        last = self._expect(kept)[-len(self._after) :]
        engine = build()
        check = self._check
        engine.forward([_chain(0, self._long[:6])])
        first = engine.forward([_chain(0, self._long[6:], 6), _chain(1, self._short)])
        check(first, np.concatenate([chunk, others[:SHORT]]))
        tree = Segment(0, LONG, self._nodes, LONG - 1 + np.array([len(path) for path in paths]), _ancestors(paths))
        both = engine.forward([tree, _chain(1, self._after, SHORT)])
        check(both, np.concatenate([*expected, others[SHORT:]]))
        engine.move(0, LONG + np.array(paths[4]), LONG + np.arange(len(paths[4])))
        engine.copy(0, 1, LONG + len(paths[4]))
        check(engine.forward([_chain(1, self._after, LONG + len(paths[4]))]), last)

    def of_chains(self, build: Callable[[], Engine]) -> None:
        """Two sessions in turns, in chunks of several tokens and of one, and a copy."""
        text = np.concatenate([self._long, self._after])
        expected, others = self._expect(text), self._expect(np.concatenate([self._short, self._after]))
        engine = build()
        check = self._check
        check(
            engine.forward([_chain(0, text[:6]), _chain(1, self._short)]),
            np.concatenate([expected[:6], others[:SHORT]]),
        )
        check(engine.forward([_chain(0, text[6:LONG], 6)]), expected[6:LONG])
        check(engine.forward([_chain(1, self._after[:1], SHORT)]), others[SHORT : SHORT + 1])
        engine.copy(0, 1, LONG)
        check(engine.forward([_chain(0, text[LONG : LONG + 1], LONG)]), expected[LONG : LONG + 1])
        check(engine.forward([_chain(1, self._after, LONG)]), expected[LONG:])

    def _expect(self, text: Text) -> NDArray[np.float32]:
        """What the model itself says, [tokens, vocabulary]; it must be asked before an engine has it attend its way."""
        self._pretrained.attend_by(self._pretrained.attention)
        return self._pretrained.logits(text.tolist()).numpy()

    def _check(self, said: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        off = float(np.sqrt(((said - expected) ** 2).mean(1).max()))
        allowed = self._tolerance * float(expected.std())
        if not off <= allowed:  # not a number is not well either
            raise _Failed(
                f"what it says over several sessions' rows is not what it says of each text alone: {off:.2g} off, "
                f"where rounding explains {allowed:.2g}"
            )


def _reason(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, _Failed) else f"it does not run over a cache of rows: {line}"


def _chain(slot: int, tokens: Text, prefix: int = 0) -> Segment:
    return Segment(slot, prefix, tokens, np.arange(prefix, prefix + len(tokens)))


def _path(node: int) -> list[int]:
    """Nodes from the root's child down to this one."""
    return [] if node < 0 else [*_path(PARENTS[node]), node]


def _ancestors(paths: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    mask = np.zeros((len(paths), len(paths)), np.bool_)
    for node, path in enumerate(paths):
        mask[node, list(path)] = True
    return mask
