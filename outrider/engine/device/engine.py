"""The engine on an accelerator: the Llama family, with a step's few numbers as all that the host waits for.

A pass runs at one of a few sizes (`buckets`). All that it needs is laid out in one buffer and copied at once
(`staging`); what follows is recorded the first time, and replayed as one call (`recording`): the layers (`layers`), the
attention that is fastest at that size (`attention`, `kernels`), the head for the rows that want it, and the choice of
tokens under shared noise (`choosing`). Only the chosen tokens come back. Logits stay where they are until a row is
asked for: by contracts with filters or penalties, and by drafters.

With `device="cpu"` the same code runs unrecorded, which is how it is tested; `NativeEngine` is the one for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from outrider.core.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.depth import kept_layers
from outrider.engine.device import layers
from outrider.engine.device.attention import Attend, visible
from outrider.engine.device.buckets import Bucket, bucket_of, grouped
from outrider.engine.device.choosing import best, noise_steps
from outrider.engine.device.kernels import CompiledKernels, DeviceKernels, Kernels, can_compile
from outrider.engine.device.recording import CudaGraphs, Recent, Recorder, Replay, Unrecorded
from outrider.engine.device.said import Said
from outrider.engine.device.staging import Inputs, Staging
from outrider.engine.device.weights import ModelWeights, load_weights
from outrider.engine.engine import SCRATCH, Engine, Numerics, Traits
from outrider.engine.group import ALONE, TensorGroup
from outrider.engine.logits import Logits
from outrider.engine.weights import Source
from outrider.errors import ConfigError

DeviceDtype = Literal["float32", "bfloat16"]
Compiling = Literal["tuned", "plain", "off"]

RECORDINGS = 96  # that are kept
ROW_TILE = 8  # a mask's rows are multiples of so many numbers, as kernels want them
GREEDY = Draw(0, 0.0)


@dataclass(slots=True)
class _Recording:
    """A bucket's buffers, and what is done over them."""

    bucket: Bucket
    staging: Staging
    logits: Tensor  # [outputs, vocabulary] float32
    replay: Replay
    choosers: dict[int, _Chooser] = field(default_factory=dict)  # by candidates


@dataclass(frozen=True, slots=True)
class _Chooser:
    answers: Tensor  # [outputs, 2 * candidates] float64: tokens, then their scores
    replay: Replay


class DeviceEngine(Engine):
    """One rank's part of a model on a device, or all of it.

    Weights and KV are bfloat16 or float32, linears give the same; residual stream, norms, rotations and logits are
    float32. A row's last bits depend on its pass's bucket. On a group of ranks the logits are on rank 0 alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        digest: bytes,
        *,
        device: torch.device,
        slots: int,
        rows: int,
        group: TensorGroup,
        kernels: Kernels,
        recorder: Recorder,
    ) -> None:
        """`config`: the shape of this rank's part."""
        dtype = weights.head.dtype
        self._spare_row = rows  # padding's keys and values go there
        tiled = -(-(rows + 1) // ROW_TILE) * ROW_TILE
        shape = (config.layers, 2, slots, config.kv_heads, tiled, config.head_dim)
        self._cache = torch.zeros(shape, dtype=dtype, device=device)
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=max(rows, config.context),
                rows=rows,
                slots=slots,
                parameters=weights.parameters,
                dtype=str(dtype).removeprefix("torch."),
                numerics="fast",
                tokenizer_digest=digest,
                eos_ids=config.eos_ids,
                weight_bytes=weights.bytes_of_a_pass,
                kv_bytes=self._cache.nbytes,
                draws=True,
                sayable=config.sayable,
            )
        )
        self.device = device
        self._config = config
        self._form = layers.Form(config.heads, config.kv_heads, config.head_dim, config.ffn, config.eps)
        self._weights = weights
        self._group = group
        self._kernels = kernels
        self._recorder = recorder
        self._recordings: Recent[_Recording] = Recent(RECORDINGS)
        turns = config.rope.table(self.positions, config.head_dim)
        self._cos, self._sin = (torch.from_numpy(part).to(device) for part in turns)
        self._steps = noise_steps(config.vocabulary, device)
        self._moves: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: str,
        dtype: str,
        layers: int | None = None,
        skip: Collection[int] = (),
        slots: int,
        rows: int | None = None,
        numerics: Numerics = "fast",
        group: TensorGroup = ALONE,
        compiling: Compiling = "plain",
        progress: Callable[[float], None] | None = None,
    ) -> DeviceEngine:
        """Loads a checkpoint folder, or a rank's part of it; see `NativeEngine.load`.

        `compiling`: have torch compile the layers, where there is a compiler, and try many kernels or not.
        Raises CheckpointError, and ConfigError for a device that is not there or weights that it does not do.
        """
        if numerics != "fast":
            raise ConfigError(f"numerics: {numerics} is not possible with device {device}; use fast, or device cpu")
        check_device(device)
        weights = Weights(path, progress)
        config = read_config(path)
        engine = cls.of(
            weights,
            config,
            read_tokenizer_digest(path),
            device=device,
            dtype=dtype,
            kept=kept_layers(config.layers, layers, skip),
            slots=slots,
            rows=rows,
            group=group,
            compiling=compiling,
        )
        weights.finish()
        return engine

    @classmethod
    def of(
        cls,
        source: Source,
        config: ModelConfig,
        digest: bytes,
        *,
        device: str,
        dtype: str,
        kept: Sequence[int] | None = None,
        slots: int,
        rows: int | None = None,
        group: TensorGroup = ALONE,
        compiling: Compiling = "plain",
    ) -> DeviceEngine:
        """Over weights from anywhere."""
        if slots < 1 or (rows is not None and rows < 2):
            raise ValueError(f"an engine needs a slot and two rows, not {slots} slots and {rows} rows")
        there = check_device(device)
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype: is {dtype}, must be float32 or bfloat16 with device {device}")
        kept = range(config.layers) if kept is None else kept
        kernels: Kernels = Kernels()
        recorder: Recorder = Unrecorded()
        if there.type == "cuda":
            kernels, recorder = DeviceKernels(), CudaGraphs(there)
            if compiling != "off" and can_compile(there):
                kernels = CompiledKernels(fused_sums=group.shard.of == 1, tuned=compiling == "tuned")
        with torch.inference_mode():
            return cls(
                group.shard.config(replace(config, layers=len(kept))),
                load_weights(source, config, group.shard, kept, there, getattr(torch, dtype)),
                digest,
                device=there,
                slots=slots,
                rows=config.context + SCRATCH if rows is None else rows,
                group=group,
                kernels=kernels,
                recorder=recorder,
            )

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        return self._pass(segments, [None] * len(segments), 0).all()

    def judge(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        said = self._pass(segments, draws, max(2, min(best, self.vocabulary)) if any(draws) else 0)
        said.fetch()
        return said

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        if len(source):
            self._moves.append((slot, source, destination))

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        with torch.inference_mode(), self._present():
            self._apply_moves()
            self._cache[:, :, target, :, :rows].copy_(self._cache[:, :, source, :, :rows])

    def _apply_moves(self) -> None:
        """All that were asked for, in order: at once where they are of different slots. Nobody waits for them."""
        while self._moves:
            together: dict[int, tuple[int, NDArray[np.int64], NDArray[np.int64]]] = {}
            for move in self._moves:
                if move[0] in together:
                    break
                together[move[0]] = move
            self._moves = self._moves[len(together) :]
            slots = np.concatenate([np.full(len(source), slot) for slot, source, _ in together.values()])
            sources = np.concatenate([source for _, source, _ in together.values()])
            targets = np.concatenate([target for _, _, target in together.values()])
            slot, source, target = self._sent(np.stack([slots, sources, targets]))
            self._cache[:, :, slot, :, target] = self._cache[:, :, slot, :, source]

    def _sent(self, numbers: NDArray[np.int64]) -> Tensor:
        here = torch.from_numpy(numbers)
        # Pinned memory is held until the copy has read it.
        return here.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else here

    def _pass(self, segments: Sequence[Segment], draws: Sequence[Draw | None], candidates: int) -> Said:
        """`candidates`: that are chosen for each row; 0: none."""
        self.check_segments(segments)
        said = Said(self.vocabulary, [segment.outputs for segment in segments])
        with torch.inference_mode(), self._present():
            self._apply_moves()
            parts = grouped(segments)
            buckets = [bucket_of([segments[index] for index in part], self.slots, self.rows_held) for part in parts]
            for number, (part, bucket) in enumerate(zip(parts, buckets, strict=True)):
                recording = self._recordings.get(bucket, lambda bucket=bucket: self._prepare(bucket))  # type: ignore[misc]
                mine = [draws[index] for index in part]
                recording.staging.send([segments[index] for index in part], mine)
                recording.replay()
                if not bucket.outputs or self._group.shard.rank:
                    continue
                logits, answers = recording.logits, None
                if candidates and any(draw is not None for draw in mine):
                    answers = self._choose(recording, candidates)
                if bucket in buckets[number + 1 :]:  # its buffers are about to be used again
                    logits, answers = logits.clone(), None if answers is None else answers.clone()
                said.add(part, [draw is not None for draw in mine], logits, answers)
        return said

    def _present(self) -> AbstractContextManager[object]:
        """Which device is the present one is a thread's own affair."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @property
    def rows_held(self) -> int:
        """Cache rows of a slot, the spare one and what rounds them up included."""
        return self._cache.shape[4]

    def _prepare(self, bucket: Bucket) -> _Recording:
        """Makes a bucket's buffers; its first pass, over nothing but padding, is recorded."""
        staging = Staging(bucket, self._spare_row, self.device)
        logits = torch.zeros(bucket.outputs, self.vocabulary, device=self.device)
        staging.clear()
        inputs = staging.inputs
        attend = self._choose_attention(bucket, inputs)
        replay = self._recorder.record(lambda: self._run(bucket, inputs, logits, attend))
        return _Recording(bucket, staging, logits, replay)

    def _choose_attention(self, bucket: Bucket, inputs: Inputs[Tensor]) -> Attend:
        form = self._form
        group = form.heads // form.kv_heads
        queries = torch.zeros(
            bucket.slots,
            bucket.width * group,
            form.kv_heads,
            form.head_dim,
            dtype=self._cache.dtype,
            device=self.device,
        )
        keys, values = self._seen_rows(bucket, inputs, 0)
        return self._kernels.attend(self._recorder, queries, keys, values, self._mask(bucket, inputs))

    def _choose(self, recording: _Recording, candidates: int) -> Tensor:
        """Has the tokens chosen: [outputs, 2 * candidates] float64, on the device."""
        if candidates not in recording.choosers:
            answers = torch.zeros(recording.bucket.outputs, 2 * candidates, dtype=torch.float64, device=self.device)
            inputs, logits = recording.staging.inputs, recording.logits

            def choose() -> None:
                scores = self._kernels.scores(logits, inputs.keys, inputs.temperatures, self._steps)
                tokens, values = best(scores, candidates)
                answers[:, :candidates] = tokens.double()
                answers[:, candidates:] = values

            recording.choosers[candidates] = _Chooser(answers, self._recorder.record(choose))
        chooser = recording.choosers[candidates]
        chooser.replay()
        return chooser.answers

    def _run(self, bucket: Bucket, inputs: Inputs[Tensor], logits: Tensor, attend: Attend) -> None:
        """The pass itself: no shape depends on a value, and nothing is read by the host."""
        form, weights, kernels, add = self._form, self._weights, self._kernels, self._group.sum
        hidden = self._group.join(embedding(inputs.tokens, weights.embedding)).float()
        turn = layers.Rotation(*(it.index_select(0, inputs.positions)[:, None] for it in (self._cos, self._sin)))
        seen = self._mask(bucket, inputs)
        queries, new = kernels.begin(weights.layers[0], form, hidden, turn)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            self._cache[index][:, inputs.written_slots, :, inputs.written_rows] = new
            if index == last and not bucket.outputs:
                return  # only the KV was wanted
            attended = self._attend(bucket, inputs, index, queries, seen, attend)
            if index < last:
                following = weights.layers[index + 1]
                hidden, queries, new = kernels.between(layer, following, form, hidden, attended, turn, add)
            else:
                hidden = kernels.end(layer, form, hidden, attended, add)
        wanted = layers.normed(hidden.index_select(0, inputs.outputs), weights.norm, form.eps)
        whole = self._group.collect(layers.head(wanted, weights.head))
        if whole is not None:
            logits.copy_(whole[:, : self.vocabulary])
            logits[:, self._config.sayable :].fill_(-torch.inf)

    def _mask(self, bucket: Bucket, inputs: Inputs[Tensor]) -> Tensor:
        group = self._form.heads // self._form.kv_heads
        return visible(inputs.prefixes, inputs.trees.bool(), bucket.context, self._cache.dtype, group)

    def _seen_rows(self, bucket: Bucket, inputs: Inputs[Tensor], layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values: [slots, kv_heads, context, dim] each."""
        if not bucket.gathered:
            keys, values = self._cache[layer, :, : bucket.slots, :, : bucket.context]
            return keys, values
        keys, values = self._cache[layer, :, :, :, : bucket.context]
        return keys.index_select(0, inputs.slots), values.index_select(0, inputs.slots)

    def _attend(
        self, bucket: Bucket, inputs: Inputs[Tensor], layer: int, queries: Tensor, seen: Tensor, attend: Attend
    ) -> Tensor:
        """[rows, heads, dim] -> [rows, heads * dim]"""
        form = self._form
        if not bucket.square:
            queries = queries.index_select(0, inputs.row_of)
        folded = queries.reshape(bucket.slots, -1, form.kv_heads, form.head_dim)
        attended = attend(folded, *self._seen_rows(bucket, inputs, layer), seen)
        attended = attended.reshape(bucket.slots * bucket.width, form.heads * form.head_dim)
        return attended if bucket.square else attended.index_select(0, inputs.query_of)

    def _try(self, segment: Segment) -> None:
        self.judge([segment], [GREEDY])


def check_device(name: str) -> torch.device:
    """The device. Raises ConfigError when it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: is '{name}', must be cpu, cuda, or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device: is '{name}', must be cpu, cuda, or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"device: there is no {name} here: torch sees {count} CUDA device{'' if count == 1 else 's'}")
    return torch.device("cuda", device.index or 0)
