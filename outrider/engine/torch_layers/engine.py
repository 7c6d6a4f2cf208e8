"""The engine on torch for Llama-family checkpoints on a CPU: one packed pass over the rows of many sessions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, silu

from outrider.engine.adapters.low_rank import AdapterFiles, LowRankAdapter, most_bytes, parse_adapter
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import SCRATCH, Dtype, Engine, Traits, check_sizes
from outrider.engine.interface.features import Features
from outrider.engine.layer_selection import kept_layers
from outrider.engine.tensor_parallel.group import ALONE, TensorGroup
from outrider.engine.threads import TorchThreads, run_in_short_lived_thread
from outrider.engine.torch_layers.adapter import PassAdapters, check_adapter, pack_adapter
from outrider.engine.torch_layers.attention import FastAttention, attend_runs
from outrider.engine.torch_layers.kv_cache import KVCache
from outrider.engine.torch_layers.model import EagerLayer, EagerModel, load_model
from outrider.engine.torch_layers.packing import Packed, pack, rows_of
from outrider.engine.torch_layers.quantized import check_quantized
from outrider.engine.torch_layers.weights import complex_rotations


class NativeEngine(Engine):
    """A model, or a rank's part of it.

    The linears of the layers are float32, bfloat16, int8 or int4; the head is float32, or int8 where they are
    quantized; the embedding has the checkpoint's type. All else is float32: residual stream, norms, attention, KV,
    logits. The linears of a row have the same bits in all passes; its attention may differ in the last bits with the
    pass's shape. Only rank 0 has the logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: EagerModel,
        digest: bytes,
        *,
        dtype: Dtype,
        slots: int,
        rows: int,
        threads: int,
        group: TensorGroup,
        features: Features | None = None,
        kept: Sequence[int],
        complete: ModelConfig,
    ) -> None:
        """`config`: the shape of this rank's part; `kept`: the layers of the checkpoint that it has; `complete`: the
        checkpoint's own shape.
        """
        self._attention = FastAttention(config.heads, config.kv_heads)
        self._cache = KVCache(config.layers, slots, config.kv_heads, rows, config.head_dim)
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=max(rows, config.context),
                rows=rows,
                slots=slots,
                parameters=model.parameters,
                dtype=dtype,
                numerics="fast",
                tokenizer_digest=digest,
                eos_ids=config.eos_ids,
                weight_bytes=model.bytes_of_a_pass,
                kv_bytes=self._cache.bytes,
                features=features,
                unpadded_vocabulary=config.unpadded_vocabulary,
                adapter_bytes=most_bytes(complete),
            )
        )
        self._hidden = torch.empty(0)
        self._config = config
        self._model = model
        self._group = group
        self._dtype = dtype
        self._kept = kept
        self._complete = complete
        self._rope = complex_rotations(config.rope, self.positions, config.head_dim)
        self._threads = TorchThreads(threads)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: Dtype,
        layers: int | None = None,
        skip: Collection[int] = (),
        slots: int,
        rows: int | None = None,
        threads: int | None = None,
        group: TensorGroup = ALONE,
        features: Features | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> NativeEngine:
        """Load a checkpoint folder, or a rank's part of it.

        `dtype`: type of the weights; others are converted, for int8 and int4 quantized, while they are read.
        `layers`: run the first ones alone, then the final norm and the head (early exit). `skip`: run all layers but
        these. Layers that are left out are not read, and do not count in `parameters`.
        `slots`: number of sessions. `rows`: cache rows of each; None: the checkpoint's context and 256 of scratch.
        `threads`: of operations, in the complete process; None: torch's choice. `group`: the ranks that share a model.
        `features`: that passes return beside logits. `progress` is called with the fraction done, 0 to 1.

        Raises CheckpointError for a checkpoint that is missing, corrupt or not supported, with the file and what to do;
        ConfigError where this machine's libraries do not support `dtype`, for layers that the checkpoint does not have,
        and for ranks that cannot share it.
        """
        check_sizes(slots, rows)
        if threads is not None:
            torch.set_num_threads(threads)
        config = read_config(path)
        kept = kept_layers(config.layers, layers, skip)
        if features is not None:
            features.check(len(kept))
        part = group.shard.config(replace(config, layers=len(kept)))
        if dtype in ("int8", "int4"):
            check_quantized(dtype)
        digest = read_tokenizer_digest(path)
        weights = Weights(path, progress)
        with torch.inference_mode():
            model = load_model(weights, config, group.shard, dtype, kept)
            weights.finish()
            return cls(
                part,
                model,
                digest,
                dtype=dtype,
                slots=slots,
                rows=config.context + SCRATCH if rows is None else rows,
                threads=torch.get_num_threads(),
                group=group,
                features=features,
                kept=kept,
                complete=config,
            )

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        for segment in segments:
            if segment.adapter is not None:
                check_adapter(segment.adapter, self._config, self._dtype)
        self._threads.prepare()
        with torch.inference_mode():
            packed = pack(segments)
            hidden = self._run_layers(packed, segments)
            if not packed.outputs_used:
                return np.empty((0, self.vocabulary), np.float32)
            logits = self._group.gather(self._model.head(hidden))
            if logits is None:
                return np.empty((0, self.vocabulary), np.float32)
            if self.unpadded_vocabulary < self.vocabulary:
                logits[:, self.unpadded_vocabulary :] = -torch.inf
            return logits.numpy()[: packed.outputs_used, : self.vocabulary]

    def pack_adapter(self, files: AdapterFiles) -> tuple[object, LowRankAdapter]:
        adapter = parse_adapter(files, self._complete)
        part = self._group.shard.adapter(adapter, self._complete)
        pack_part = partial(pack_adapter, part, self._config, self._kept, self._dtype)
        return run_in_short_lived_thread(pack_part), adapter

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        with torch.inference_mode():
            self._cache.move(slot, torch.from_numpy(source), torch.from_numpy(destination))

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        with torch.inference_mode():
            self._cache.copy(source, target, rows)

    def hidden(self) -> Tensor:
        return self._hidden

    def _run_layers(self, packed: Packed, segments: Sequence[Segment]) -> Tensor:
        """Run all layers; return the head's inputs of the rows that want logits, [outputs, width] float32.

        Stores the features.
        """
        hidden = self._group.all_gather(embedding(packed.tokens, self._model.embedding)).float()
        rotations = self._rope.index_select(0, packed.positions).unsqueeze(1)  # [rows, 1, head_dim / 2] complex64
        calls = [self._attention.prepare(run) for run in packed.runs]
        views = [self._cache.views(run) for run in packed.runs]
        write = self._cache.writer(packed.written)
        wanted = self.features
        all_rows = wanted is not None and wanted.needs_last_layer
        adapters = PassAdapters(segments, packed)
        taken: dict[int, Tensor] = {}  # outputs of layers, of all packed rows
        last = len(self._model.layers) - 1
        for index, layer in enumerate(self._model.layers):
            new = adapters.apply(layer.qkv, index, "qkv", layer.attention_norm(hidden)).float()
            query, key_value = self._rotate(layer, new, rotations)
            write(index, key_value[: packed.used])
            if index == last and not packed.outputs_used and not all_rows:
                break  # only the KV is wanted
            attended = attend_runs(query, packed, calls, [(keys[index], values[index]) for keys, values in views])
            if index == last and packed.outputs is not None and not all_rows:
                attended = attended.index_select(0, packed.outputs)
                hidden = hidden.index_select(0, packed.outputs)
                adapters.keep_outputs()
            hidden.add_(self._group.all_reduce(adapters.apply(layer.output, index, "output", attended)))
            gate_up = adapters.apply(layer.gate_up, index, "gate_up", layer.ffn_norm(hidden))
            gate, up = gate_up[:, : self._config.ffn], gate_up[:, self._config.ffn :]
            hidden.add_(self._group.all_reduce(adapters.apply(layer.down, index, "down", silu(gate).mul_(up))))
            if wanted is not None and index + 1 in wanted.layers:
                taken[index + 1] = hidden.clone()
        normed = self._model.norm(hidden)
        if wanted is not None:
            self._hidden = _features(wanted, taken, normed, packed, segments)
        return normed.index_select(0, packed.outputs) if all_rows and packed.outputs is not None else normed

    def _rotate(self, layer: EagerLayer, new: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """Apply RoPE; return queries [rows, heads * dim], contiguous, and keys and values [rows, 2, kv_heads, dim]."""
        config = self._config
        rows, heads, kv_heads, dim = new.shape[0], config.heads, config.kv_heads, config.head_dim
        shaped = new.view(rows, heads + 2 * kv_heads, dim)
        if layer.head_norms is not None:
            of_query, of_key = layer.head_norms
            shaped[:, :heads] = of_query(shaped[:, :heads])
            shaped[:, heads : heads + kv_heads] = of_key(shaped[:, heads : heads + kv_heads])
        pairs = torch.view_as_complex(new.view(rows, heads + 2 * kv_heads, dim // 2, 2))
        pairs[:, : heads + kv_heads].mul_(rotations)
        key_value = shaped[:, heads:].view(rows, 2, kv_heads, dim)
        return new[:, : heads * dim].contiguous(), key_value


def _features(
    wanted: Features, taken: Mapping[int, Tensor], normed: Tensor, packed: Packed, segments: Sequence[Segment]
) -> Tensor:
    """Return the features for `Engine.hidden`.

    `taken`: outputs of layers, of all packed rows; `normed`: the inputs of the head.
    """
    found = torch.cat([taken[layer] for layer in wanted.layers], -1) if taken else normed
    if wanted.all_rows:
        return found.index_select(0, rows_of(packed, segments))
    chosen = found.index_select(0, packed.outputs) if taken and packed.outputs is not None else found
    return chosen[: packed.outputs_used]
