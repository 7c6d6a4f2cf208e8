"""The engine for CPUs: one compiled call a pass, from token ids to logits and chosen tokens.

All sums have a fixed order, whatever else the pass contains: a linear sums over its inputs, attention over the keys of
a path in the order of positions. So a token's logits and KV have the same bits in every batch, tree and chunk and with
any number of threads, on one kind of processor. KV is in pages of 16 rows, in float32 for a model in float32, else in
bfloat16, or where that is asked for in int8. A slot that was copied from another one shares its pages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Choice
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.cpu.weights import CpuAdapters, check_layers, load_layers
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import PAGE, SCRATCH, Dtype, Engine, Traits, check_kv_memory
from outrider.engine.interface.logits import BestTokens, HostLogits, Logits
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.socket_group import SocketGroup
from outrider.engine.torch_layers.int4 import check_int4_shape
from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from outrider._native import Model

SPARE = 4  # pages beyond those of one text that `kv_memory` must have

MULTIPLY_BFLOAT16 = ("avx512_bf16", "amx")  # instruction sets

# Type of the head where it is not that of the layers: in int4 it would choose other tokens too often.
HEADS: dict[Dtype, Dtype] = {"int4": "int8"}


class CpuEngine(Engine):
    """The compiled engine over all of a model, some of its layers, or a rank's part of them."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        digest: bytes,
        settings: EngineSettings,
        *,
        rows: int,
        parameters: int,
        kept: Sequence[int],
        stored: str,
    ) -> None:
        """Make an engine over a compiled model with all of its weights.

        `config`: the checkpoint's own shape; `kept`: its layers that the model has; `stored`: the type of most of its
        weights.
        """
        dtype, group = settings.dtype, settings.group
        bounded = settings.kv_memory is not None
        sizes = model.sizes()
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=max(rows, config.context),
                rows=rows,
                slots=settings.slots,
                parameters=parameters,
                dtype=stored if dtype == "stored" else dtype,
                kv_dtype=settings.kv_dtype,
                numerics="invariant",
                tokenizer_digest=digest,
                eos_ids=config.eos_ids,
                weight_bytes=sizes["weight_bytes"],
                kv_bytes=sizes["kv_bytes"] + sizes["state_bytes"],
                kv_tokens=sizes["kv_bytes"] // sizes["page_bytes"] * PAGE if bounded else 0,
                features=settings.features,
                unpadded_vocabulary=config.unpadded_vocabulary,
                samples_tokens=True,
                compiles_sizes=False,
                computed_by=_computed_by(sizes["instructions"], dtype),
                rewinds=config.parts.delta is None,
            )
        )
        self._model = model
        self._bounded = bounded
        self._group = group
        self._width = config.width
        self.adapters = CpuAdapters(config, group.shard, kept, "float32" if dtype == "float32" else "bfloat16")
        self._reduced = bool(config.draft_ids)
        self._logits = np.empty(0, np.float32)  # buffer of `sample`
        self._hidden = np.empty((0, 0), np.float32)

    @classmethod
    def load(cls, path: Path, settings: EngineSettings) -> CpuEngine:
        """Load a checkpoint folder, or a rank's part of it.

        Raises CheckpointError; ConfigError for layers that the checkpoint does not have, shapes that int4 does not
        support, memory too small for one text, and ranks that cannot share the model.
        """
        dtype, group = settings.dtype, settings.group
        config = read_config(path)
        kept = settings.kept_layers(config.layers)
        part = group.shard.config(config.with_layers(kept))
        if dtype == "int4":
            check_int4_shape(part)
        digest = read_tokenizer_digest(path)
        weights = Weights(path, settings.progress)
        rows = settings.rows_for(config.context)
        parameters = check_layers(weights, config, kept)
        try:
            model = _empty_model(part, settings, rows)
            if settings.kv_memory is not None:  # room for one text and its tree
                pages = -(-(rows + SCRATCH) // PAGE) + SPARE
                check_kv_memory(settings.kv_memory, pages * model.sizes()["page_bytes"], rows)
            load_layers(model, weights, config, group.shard, kept, stored=dtype == "stored")
        except MemoryError:
            raise CheckpointError(f"{path}: there is not enough memory for {parameters / 1e6:.0f} M weights") from None
        weights.finish()
        stored = weights.main_kind
        return cls(model, config, digest, settings, rows=rows, parameters=parameters, kept=kept, stored=stored)

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        outputs = 0 if self._group.shard.rank else sum(map(_outputs, segments))
        logits = self._empty(outputs * self.vocabulary).reshape(outputs, self.vocabulary)
        self._run(segments, (), 0, logits, _NO_TOKENS, _NO_SCORES)
        return logits

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        counts = [*map(_outputs, segments)]
        outputs = sum(counts)
        walks = not best
        best = max(2, min(best, self.vocabulary)) if any(draw is not None for draw in draws) else 0
        if outputs * self.vocabulary > self._logits.size:
            self._logits = self._empty(outputs * self.vocabulary * 5 // 4)
        logits = self._logits[: outputs * self.vocabulary].reshape(outputs, self.vocabulary)
        tokens, scores = np.empty((outputs, best), np.int64), np.empty((outputs, best))
        self._run(segments, draws, best, logits, tokens, scores, walks=walks)
        drawn = [draw is not None for draw, count in zip(draws, counts, strict=True) for _ in range(count)]
        return _DrawnLogits(logits, drawn if best else [False] * outputs, tokens, scores)

    def _run(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        best: int,
        logits: NDArray[np.float32],
        tokens: NDArray[np.int64],
        scores: NDArray[np.float64],
        *,
        walks: bool = False,
    ) -> None:
        wanted, hidden = self.features, None
        if wanted is not None:
            rows = sum(len(it.tokens) if wanted.all_rows else _outputs(it) for it in segments)
            hidden = np.empty((rows, wanted.parts * self._width), np.float32)
        try:
            self._model.run(segments, draws, best, walks, logits, tokens, scores, hidden)
        except ValueError:
            self.check_segments(segments)  # raises a clearer error
            raise
        except ConnectionError as error:
            assert isinstance(self._group, SocketGroup)
            raise self._group.lost(str(error)) from error
        if hidden is not None:
            self._hidden = hidden

    def _empty(self, count: int) -> NDArray[np.float32]:
        """Return a buffer for logits. Passes do not write those of ids that a reduced head lacks."""
        return np.full(count, -np.inf, np.float32) if self._reduced else np.empty(count, np.float32)

    def hidden(self) -> Tensor:
        import torch  # only callers that use features need torch

        return torch.from_numpy(self._hidden)

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        self._model.move(slot, source, destination)

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        self._model.copy(source, target, rows)

    def release(self, slot: int, rows: int) -> None:
        self._model.release(slot, rows)

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        return self._model.pages(slot, first, end) if self._bounded else None

    @property
    def exchange_s(self) -> float:
        """Seconds that passes have spent exchanging parts with other ranks, waiting included."""
        seconds: float = self._model.sizes()["exchange_s"]
        return seconds

    @property
    def kv_bytes_taken(self) -> int:
        """Bytes of all pages in use; a page that several slots share counts once."""
        taken: int = self._model.sizes()["kv_bytes_taken"]
        return taken


_NO_TOKENS, _NO_SCORES = np.empty((0, 0), np.int64), np.empty((0, 0))


class _DrawnLogits(HostLogits):
    """Logits with the tokens that the engine has drawn from them; see `Logits`."""

    def __init__(
        self,
        rows: NDArray[np.float32],
        drawn: Sequence[bool],
        tokens: NDArray[np.int64],
        scores: NDArray[np.float64],
    ) -> None:
        super().__init__(rows)
        self._drawn = drawn
        self._tokens = tokens
        self._scores = scores

    def choice(self, index: int) -> Choice | None:
        if not self._drawn[index] or self._tokens[index, 0] < 0:  # not on the path, or the logits are NaN
            return None
        first, second = self._scores[index, :2]
        return Choice(int(self._tokens[index, 0]), float(first - second))

    def best(self, index: int) -> BestTokens | None:
        if not self._drawn[index]:
            return None
        found = self._tokens[index] >= 0  # the vocabulary without padding may be smaller than `best`
        return BestTokens(self._tokens[index][found], self._scores[index][found])


def _outputs(segment: Segment) -> int:
    """Return the number of logits rows of a segment, also where `check_segments` will refuse it."""
    return max(0, min(segment.outputs, len(segment.tokens)))


def _computed_by(instructions: str, dtype: Dtype) -> str:
    """Return what runs passes, for people, and what bfloat16 costs where the processor does not multiply it."""
    name = f"compiled kernels ({instructions})"
    if dtype != "bfloat16" or instructions in MULTIPLY_BFLOAT16:
        return name
    return f"{name}, in float32: many rows take twice as long as with bfloat16 instructions; int8 does not"


def _angles(
    ropes: Sequence[Rope | None], positions: int, turned: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines of all tables: [tables, positions, turned / 2] each."""
    shape = positions, turned // 2
    still = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    cosines, sines = zip(*(still if rope is None else rope.table(positions, turned) for rope in ropes), strict=True)
    return np.stack(cosines), np.stack(sines)


def _delta_shape(config: ModelConfig) -> tuple[object, ...]:
    """Return the sizes of the gated delta rule, and which layers have it."""
    it = config.parts.delta
    if it is None:
        return 0, 0, 0, 0, 0, False, False, [0] * config.layers
    return it.key_heads, it.value_heads, it.key_dim, it.value_dim, it.taps, it.joined, it.tiled, [*it.layers]


def _kv_kind(settings: EngineSettings) -> str:
    """Return the type of keys and values."""
    if settings.kv_dtype != "auto":
        return settings.kv_dtype
    return "float32" if settings.dtype == "float32" else "bfloat16"


def _empty_model(config: ModelConfig, settings: EngineSettings, rows: int) -> Model:
    """Return a compiled model without weights. `config`: the shape of this rank's part."""
    from outrider._native import Model

    positions, features, group = max(rows, config.context), settings.features, settings.group
    experts = config.parts.experts
    ropes = list(dict.fromkeys(it.rope for it in config.attention))
    return Model(
        settings.dtype,
        HEADS.get(settings.dtype, settings.dtype),
        _kv_kind(settings),
        (
            config.vocabulary,
            config.unpadded_vocabulary,
            config.width,
            config.layers,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.ffn,
            positions,
            settings.slots,
            rows,
            config.eps,
            settings.kv_memory or 0,
        ),
        (
            config.query_scale,
            config.parts.embedding_scale,
            config.parts.residual_scale,
            config.parts.score_cap,
            config.parts.logit_cap,
            config.turned,
            config.parts.whole_norms,
            config.parts.gated,
            config.parts.activation,
            [it.window for it in config.attention],
            [ropes.index(it.rope) for it in config.attention],
        ),
        (0, 0, 0, False, 0)
        if experts is None
        else (experts.count, experts.used, experts.ffn, experts.even, experts.shared),
        _delta_shape(config),
        *_angles(ropes, positions, config.turned),
        settings.threads or len(os.sched_getaffinity(0)),
        settings.instructions,
        () if features is None else features.layers,
        features is not None and features.all_rows,
        (group.shard.rank, group.timeout_s, group.sockets) if isinstance(group, SocketGroup) else (0, 0.0, ()),
    )
