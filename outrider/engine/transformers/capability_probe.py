"""Probes what a model of `transformers` supports when it loads, instead of guessing from its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.masks import path_mask
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.transformers.engine import Masks, TransformersEngine
from outrider.engine.transformers.pretrained import Pretrained
from outrider.engine.transformers.treeless import Reading, TreelessEngine
from outrider.errors import CheckpointError

# Tolerated error of logits against one pass over the text, in standard deviations of those logits. A wrong mask causes
# a much larger error, rounding a much smaller one.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.1, "int4": 0.1}
SANE = 0.5  # tolerance where the method has passed in float32: rounding may send a row to another expert
WINDOW = 6  # tokens back that layers with a window see in a probe, fewer than its texts have
LONG, SHORT = 11, 4  # tokens of a probe's two texts
PARENTS = (-1, 0, 1, -1, 3)  # of a probe's tree: two branches
ROWS = 32

Text = NDArray[np.int64]


class ServingMethod(NamedTuple):
    """The method with which a model is served: with trees, or with chains only."""

    masks: Masks | None  # None: chains only
    reading: Reading | None = None
    reason: str = ""  # why the model computes no trees

    def build(self, pretrained: Pretrained, settings: EngineSettings) -> TransformersEngine | TreelessEngine:
        """Return the engine that serves the model with this method."""
        if self.masks is not None:
            return TransformersEngine(pretrained, settings, masks=self.masks)
        assert self.reading is not None
        return TreelessEngine(pretrained, settings, reason=self.reason, reading=self.reading)


# The best method first.
SERVING_METHODS = (
    ServingMethod("asked"),
    ServingMethod("given"),
    ServingMethod(None, "chunks"),
    ServingMethod(None, "one by one"),
    ServingMethod(None, "anew"),
)


class _WrongLogits(Exception):
    """The logits differ from those of one pass over the text."""


def find_serving_method(pretrained: Pretrained, *, after: ServingMethod | None = None) -> ServingMethod:
    """Return the first serving method with which the model passes its probe.

    `after`: the method of the same model in another precision; better methods are not probed. All ranks of a group find
    the same method, because the probe gives all of them the logits. Raises CheckpointError when there is none.
    """
    tolerance = TOLERANCE[pretrained.dtype] if after is None else SANE
    methods = [method for method in SERVING_METHODS if after is None or not _better(method, after)]
    reason = after.reason if after is not None else ""
    last = ""
    for method in methods:
        method = method._replace(reason=reason if method.masks is None else "")
        build = partial(method.build, pretrained, EngineSettings(dtype=pretrained.dtype, slots=2, rows=ROWS))
        try:
            with torch.inference_mode(), pretrained.limited_windows(WINDOW):
                probe = _Probe(pretrained, tolerance)
                (probe.check_chains if method.masks is None else probe.check_trees)(build)
            return method
        except Exception as error:  # a model may raise anything that its method does not support
            last = _reason(error)
            reason = reason or last
    raise CheckpointError(f"this model cannot be served, not even without speculation: {last}")


def _better(method: ServingMethod, found: ServingMethod) -> bool:
    """Return whether a method comes before another one."""
    order = [(it.masks, it.reading) for it in SERVING_METHODS]
    return order.index((method.masks, method.reading)) < order.index((found.masks, found.reading))


class _Probe:
    """Compares an engine's logits with those of the model itself on random texts."""

    def __init__(self, pretrained: Pretrained, tolerance: float) -> None:
        self._pretrained = pretrained
        self._tolerance = tolerance
        random = np.random.default_rng(1)
        avoided = getattr(pretrained.model.config.get_text_config(), "pad_token_id", None)
        usual = np.array([token for token in range(min(pretrained.vocabulary, 4096)) if token != avoided])
        self._long, self._short = (random.choice(usual, count) for count in (LONG, SHORT))
        self._nodes: Text = random.choice(usual, len(PARENTS))
        self._after: Text = random.choice(usual, 3)

    def check_trees(self, build: Callable[[], Engine]) -> None:
        """Check two sessions in one call, a prompt in two chunks, a tree whose second branch is kept, and a copy."""
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
        mask = path_mask(paths, len(paths))
        tree = Segment(0, LONG, self._nodes, LONG - 1 + mask.sum(axis=1), mask)
        both = engine.forward([tree, _chain(1, self._after, SHORT)])
        check(both, np.concatenate([*expected, others[SHORT:]]))
        engine.move(0, LONG + np.array(paths[4]), LONG + np.arange(len(paths[4])))
        engine.copy(0, 1, LONG + len(paths[4]))
        check(engine.forward([_chain(1, self._after, LONG + len(paths[4]))]), last)

    def check_chains(self, build: Callable[[], Engine]) -> None:
        """Check two sessions in turns, in chunks of several tokens and of one, and a copy."""
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
        """Return the model's own logits, [tokens, vocabulary]. Must run before an engine sets another attention."""
        self._pretrained.set_attention(self._pretrained.attention)
        return self._pretrained.logits(text.tolist()).numpy()

    def _check(self, logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Raise where logits are further from the expected ones than rounding explains."""
        off = float(np.sqrt(((logits - expected) ** 2).mean(1).max()))
        allowed = self._tolerance * float(expected.std())
        if not off <= allowed:  # also where `off` is not a number
            raise _WrongLogits(
                f"its logits over rows of several sessions differ from those of each text alone by {off:.2g}, "
                f"and rounding explains only {allowed:.2g}"
            )


def _reason(error: Exception) -> str:
    """Return why a method does not serve a model, in one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, _WrongLogits) else f"it does not run over a cache of rows: {line}"


def _chain(slot: int, tokens: Text, prefix: int = 0) -> Segment:
    return Segment(slot, prefix, tokens, np.arange(prefix, prefix + len(tokens)))


def _path(node: int) -> list[int]:
    """Return the nodes from the root's child down to this one."""
    return [] if node < 0 else [*_path(PARENTS[node]), node]
