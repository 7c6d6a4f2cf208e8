"""The engine on an accelerator, for the Llama family. The host waits only for the few numbers that a step needs.

A pass runs at one of a few sizes (`buckets`). One copy brings all of its inputs to the device (`input_buffers`). The
rest is recorded the first time, and replayed as one call (`cuda_graphs`): the layers (`layers`), the attention that is
fastest at that size (`attention`, `kernels`), the head for the rows that want logits, and the choice of tokens under
shared noise (`sampling`). Only the chosen tokens return to the host. Logits stay on the device until a row is used, by
contracts with filters or penalties and by drafters.

With `device="cpu"` the same code runs without recordings, which serves tests; for CPUs use `CpuEngine`.
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

from outrider.core.sampling.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.device import layers
from outrider.engine.device.attention import Attend, visible
from outrider.engine.device.buckets import Bucket, bucket_of, group_segments
from outrider.engine.device.cuda_graphs import CudaGraphs, NoRecorder, RecentRecordings, Recorder, Replay
from outrider.engine.device.device_logits import DeviceLogits
from outrider.engine.device.input_buffers import InputBuffers, Inputs
from outrider.engine.device.kernels import CompiledKernels, DeviceKernels, Kernels, can_compile
from outrider.engine.device.sampling import best, noise_steps
from outrider.engine.device.weights import ModelWeights, load_weights
from outrider.engine.eager.weights import WeightSource
from outrider.engine.engine import SCRATCH, Engine, Numerics, Traits, check_sizes
from outrider.engine.layer_selection import kept_layers
from outrider.engine.logits import Logits
from outrider.engine.ranks.group import ALONE, TensorGroup
from outrider.errors import ConfigError

DeviceDtype = Literal["float32", "bfloat16"]
Compiling = Literal["tuned", "plain", "off"]

RECORDINGS = 96  # maximum of recordings in memory
ROW_TILE = 8  # a mask's rows are multiples of so many numbers, which kernels need
GREEDY = Draw(0, 0.0)


@dataclass(slots=True)
class _Recording:
    """The buffers of a bucket and the recorded pass over them."""

    bucket: Bucket
    input_buffers: InputBuffers
    logits: Tensor  # [outputs, vocabulary] float32
    replay: Replay
    choosers: dict[int, _Chooser] = field(default_factory=dict)  # by candidates


@dataclass(frozen=True, slots=True)
class _Chooser:
    """The recorded choice of a bucket's tokens."""

    choices: Tensor  # [outputs, 2 * candidates] float64: tokens, then their scores
    replay: Replay


class DeviceEngine(Engine):
    """A model on a device, or a rank's part of it.

    Weights, KV and outputs of linears are bfloat16 or float32; residual stream, norms, rotations and logits are
    float32. A row's last bits depend on its pass's bucket. In a group of ranks only rank 0 has the logits.
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
        self._spare_row = rows  # the keys and values of padding go there
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
                samples=True,
                unpadded_vocabulary=config.unpadded_vocabulary,
            )
        )
        self.device = device
        self._config = config
        self._form = layers.LayerForm(config.heads, config.kv_heads, config.head_dim, config.ffn, config.eps)
        self._weights = weights
        self._group = group
        self._kernels = kernels
        self._recorder = recorder
        self._recordings: RecentRecordings[_Recording] = RecentRecordings(RECORDINGS)
        table = config.rope.table(self.positions, config.head_dim)
        self._cos, self._sin = (torch.from_numpy(part).to(device) for part in table)
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
        """Load a checkpoint folder, or a rank's part of it; for the other parameters see `NativeEngine.load`.

        `compiling`: whether torch compiles the layers, where it has a compiler, and whether it tries many kernels.
        Raises CheckpointError, and ConfigError for a missing device or a type of weights that it does not support.
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
        source: WeightSource,
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
        """Make an engine over weights from any source."""
        check_sizes(slots, rows)
        torch_device = check_device(device)
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype: is {dtype}, must be float32 or bfloat16 with device {device}")
        kept = range(config.layers) if kept is None else kept
        kernels: Kernels = Kernels()
        recorder: Recorder = NoRecorder()
        if torch_device.type == "cuda":
            kernels, recorder = DeviceKernels(), CudaGraphs(torch_device)
            if compiling != "off" and can_compile(torch_device):
                kernels = CompiledKernels(fused_sums=group.shard.of == 1, tuned=compiling == "tuned")
        with torch.inference_mode():
            return cls(
                group.shard.config(replace(config, layers=len(kept))),
                load_weights(source, config, group.shard, kept, torch_device, getattr(torch, dtype)),
                digest,
                device=torch_device,
                slots=slots,
                rows=config.context + SCRATCH if rows is None else rows,
                group=group,
                kernels=kernels,
                recorder=recorder,
            )

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        return self._pass(segments, [None] * len(segments), 0).all()

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        logits = self._pass(segments, draws, max(2, min(best, self.vocabulary)) if any(draws) else 0)
        logits.fetch()
        return logits

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        if len(source):
            self._moves.append((slot, source, destination))

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        with torch.inference_mode(), self._current_device():
            self._apply_moves()
            self._cache[:, :, target, :, :rows].copy_(self._cache[:, :, source, :, :rows])

    def _apply_moves(self) -> None:
        """Start all queued moves in order, those of different slots together. The host does not wait for them."""
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
            slot, source, target = self._on_device(np.stack([slots, sources, targets]))
            self._cache[:, :, slot, :, target] = self._cache[:, :, slot, :, source]

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        """Begin to copy numbers to the device."""
        host = torch.from_numpy(numbers)
        # torch keeps pinned memory until the copy has read it.
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _pass(self, segments: Sequence[Segment], draws: Sequence[Draw | None], candidates: int) -> DeviceLogits:
        """Run a pass. `candidates`: tokens that are chosen for each row; 0: none."""
        self.check_segments(segments)
        result = DeviceLogits(self.vocabulary, [segment.outputs for segment in segments])
        with torch.inference_mode(), self._current_device():
            self._apply_moves()
            parts = group_segments(segments)
            buckets = [bucket_of([segments[index] for index in part], self.slots, self.rows_held) for part in parts]
            for number, (part, bucket) in enumerate(zip(parts, buckets, strict=True)):
                recording = self._recordings.get(bucket, lambda bucket=bucket: self._prepare(bucket))  # type: ignore[misc]
                part_draws = [draws[index] for index in part]
                recording.input_buffers.send([segments[index] for index in part], part_draws)
                recording.replay()
                if not bucket.outputs or self._group.shard.rank:
                    continue
                logits, choices = recording.logits, None
                if candidates and any(draw is not None for draw in part_draws):
                    choices = self._choose(recording, candidates)
                if bucket in buckets[number + 1 :]:  # a later part overwrites its buffers
                    logits, choices = logits.clone(), None if choices is None else choices.clone()
                result.add(part, [draw is not None for draw in part_draws], logits, choices)
        return result

    def _current_device(self) -> AbstractContextManager[object]:
        """Make this engine's device the current one, which torch keeps for each thread."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @property
    def rows_held(self) -> int:
        """Cache rows of a slot, with the spare one and those of rounding up."""
        return self._cache.shape[4]

    def _prepare(self, bucket: Bucket) -> _Recording:
        """Make a bucket's buffers and record its first pass, over padding alone."""
        input_buffers = InputBuffers(bucket, self._spare_row, self.device)
        logits = torch.zeros(bucket.outputs, self.vocabulary, device=self.device)
        input_buffers.clear()
        inputs = input_buffers.inputs
        attend = self._choose_attention(bucket, inputs)
        replay = self._recorder.record(lambda: self._run(bucket, inputs, logits, attend))
        return _Recording(bucket, input_buffers, logits, replay)

    def _choose_attention(self, bucket: Bucket, inputs: Inputs[Tensor]) -> Attend:
        """Return the fastest attention for the sizes of a bucket."""
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
        """Choose tokens on the device: [outputs, 2 * candidates] float64, tokens and then their scores."""
        if candidates not in recording.choosers:
            choices = torch.zeros(recording.bucket.outputs, 2 * candidates, dtype=torch.float64, device=self.device)
            inputs, logits = recording.input_buffers.inputs, recording.logits

            def choose() -> None:
                scores = self._kernels.scores(logits, inputs.keys, inputs.temperatures, self._steps)
                tokens, values = best(scores, candidates)
                choices[:, :candidates] = tokens.double()
                choices[:, candidates:] = values

            recording.choosers[candidates] = _Chooser(choices, self._recorder.record(choose))
        chooser = recording.choosers[candidates]
        chooser.replay()
        return chooser.choices

    def _run(self, bucket: Bucket, inputs: Inputs[Tensor], logits: Tensor, attend: Attend) -> None:
        """Compute the pass. No shape depends on a value, and the host reads nothing."""
        form, weights, kernels, add = self._form, self._weights, self._kernels, self._group.all_reduce
        hidden = self._group.all_gather(embedding(inputs.tokens, weights.embedding)).float()
        rotation = layers.Rotation(*(it.index_select(0, inputs.positions)[:, None] for it in (self._cos, self._sin)))
        mask = self._mask(bucket, inputs)
        queries, new = kernels.begin(weights.layers[0], form, hidden, rotation)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            self._cache[index][:, inputs.written_slots, :, inputs.written_rows] = new
            if index == last and not bucket.outputs:
                return  # only the KV is wanted
            attended = self._attend(bucket, inputs, index, queries, mask, attend)
            if index < last:
                following = weights.layers[index + 1]
                hidden, queries, new = kernels.between(layer, following, form, hidden, attended, rotation, add)
            else:
                hidden = kernels.end(layer, form, hidden, attended, add)
        wanted = layers.normed(hidden.index_select(0, inputs.outputs), weights.norm, form.eps)
        gathered = self._group.gather(layers.head(wanted, weights.head))
        if gathered is not None:
            logits.copy_(gathered[:, : self.vocabulary])
            logits[:, self._config.unpadded_vocabulary :].fill_(-torch.inf)

    def _mask(self, bucket: Bucket, inputs: Inputs[Tensor]) -> Tensor:
        group = self._form.heads // self._form.kv_heads
        return visible(inputs.prefixes, inputs.trees.bool(), bucket.context, self._cache.dtype, group)

    def _seen_rows(self, bucket: Bucket, inputs: Inputs[Tensor], layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer reads: [slots, kv_heads, context, dim] each."""
        if not bucket.gathered:
            keys, values = self._cache[layer, :, : bucket.slots, :, : bucket.context]
            return keys, values
        keys, values = self._cache[layer, :, :, :, : bucket.context]
        return keys.index_select(0, inputs.slots), values.index_select(0, inputs.slots)

    def _attend(
        self, bucket: Bucket, inputs: Inputs[Tensor], layer: int, queries: Tensor, mask: Tensor, attend: Attend
    ) -> Tensor:
        """Compute a layer's attention: queries [rows, heads, dim] -> [rows, heads * dim]."""
        form = self._form
        if not bucket.square:
            queries = queries.index_select(0, inputs.row_of)
        folded = queries.reshape(bucket.slots, -1, form.kv_heads, form.head_dim)
        attended = attend(folded, *self._seen_rows(bucket, inputs, layer), mask)
        attended = attended.reshape(bucket.slots * bucket.width, form.heads * form.head_dim)
        return attended if bucket.square else attended.index_select(0, inputs.query_of)

    def _try(self, segment: Segment) -> None:
        self.sample([segment], [GREEDY])


def check_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError when this machine does not have it."""
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
