"""Runs packed passes on a device: inputs, recorded layers, and the recorded head with its choice of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import Draw
from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.adapters.adapter_table import AdaptedPass, AdapterTable, NoAdapterTable, PlainPass
from outrider.engine.gpu.attention.kv_memory import PagedKv
from outrider.engine.gpu.attention.page_table import pages_of
from outrider.engine.gpu.attention.tree_attention import AttentionPlan
from outrider.engine.gpu.devices import Runtime
from outrider.engine.gpu.passes.cuda_graphs import Replay
from outrider.engine.gpu.passes.input_buffers import NO_OUTPUTS, InputBuffers, Outputs, moves_of
from outrider.engine.gpu.passes.llama_layers import LlamaLayers
from outrider.engine.gpu.passes.packing import ROWS, PassPart, packed, round_up
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.token_choice import Head, TokenChoice
from outrider.engine.gpu.weights import ModelWeights
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.features import Features
from outrider.engine.threads import TorchThreads

NO_MOVES = np.empty((2, 0), np.int64)


@dataclass(frozen=True, slots=True)
class RecordedLayers:
    """The recorded layers, for one number of rows, with adapters or without."""

    plan: AttentionPlan
    adapters: PlainPass | AdaptedPass
    replay: Replay


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A pass that is ready to be launched."""

    segments: list[Segment]
    layers: RecordedLayers
    runs: list[Outputs]  # at least one run; a run may have no outputs
    heads: list[Head | None]  # of each run


class PassRunner:
    """The buffers and recordings of an engine's passes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kv: PagedKv,
        runtime: Runtime,
        *,
        positions: int,
        adapters: AdapterTable | NoAdapterTable,
        features: Features | None,
        states: RowStates | None,
        make_layers: Callable[..., LlamaLayers],
    ) -> None:
        """`config`: the shape of this rank's part; `positions`: of the model; for the rest see `DeviceEngine`."""
        self._plan = partial(
            AttentionPlan.of,
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            dtype=kv.cache.dtype,
            segments=2 * kv.slots,  # a chain and the tree behind it may be two
            text_pages=pages_of(kv.rows),
        )
        plans = [self._plan(count) for count in ROWS]
        self.kv = kv
        self.runtime = runtime
        self.adapters = adapters
        self.states = states
        self.inputs = InputBuffers(plans[-1], kv.table, runtime.device)
        self.model = make_layers(
            config, weights, kv.cache, runtime, positions=positions, plans=plans, features=features
        )
        self.choice = TokenChoice(config, kv.slots, parts=self.model.logit_parts, inputs=self.inputs, runtime=runtime)
        self._threads = TorchThreads(torch.get_num_threads())
        self._wanted = features
        self._taken: list[Tensor] = []  # features of the last call's rows
        self._layers: dict[tuple[int, bool], RecordedLayers] = {}  # by rows, and whether some have an adapter

    @property
    def features(self) -> Tensor:
        """The features of the last call, see `Engine.hidden`."""
        return self._taken[0] if len(self._taken) == 1 else torch.cat(self._taken)

    def run(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        candidates: int,
        *,
        kept: bool = False,
        growing: Mapping[int, int] = MappingProxyType({}),
    ) -> DeviceLogits:
        """Run the passes of a call. `candidates`: tokens that are chosen for each row; 0: none.

        `kept`: further work will follow before the host has read the result; `growing`: rows that this work will write
        in some slots.
        """
        self._threads.prepare()
        result = DeviceLogits(self.model.vocabulary, [segment.outputs for segment in segments])
        table, self._taken = self.kv.table, []
        with self.runtime.computing():
            passes = [self.prepare(parts, draws, candidates, result.first) for parts in packed(segments)]
            for it in segments:
                end = it.prefix + it.span
                table.prepare(it.slot, end - len(it.tokens), end + growing.get(it.slot, 0))
            moves = table.take_moves()
            if moves.shape[1] > moves_of(passes[0].layers.plan.rows):
                self.kv.move(moves)
                moves = NO_MOVES
            for prepared in passes:
                self.send(prepared.layers, prepared.segments, prepared.runs[0], moves)
                moves = NO_MOVES
                for index, (run, head) in enumerate(zip(prepared.runs, prepared.heads, strict=True)):
                    chosen = self.choice.send(run, candidates)
                    if index:
                        self.inputs.send_outputs(run)
                    else:
                        prepared.layers.replay()
                    if head is not None:
                        last = not kept and prepared is passes[-1] and index == len(prepared.runs) - 1
                        self.choice.compute(head, run, chosen, result, last=last)
                self._take_features(prepared, last=prepared is passes[-1])
            self.runtime.group.finish()
        return result

    def prepare(
        self, parts: Sequence[PassPart], draws: Sequence[Draw | None], candidates: int, first: Sequence[int]
    ) -> PreparedPass:
        """Find what a pass needs. What is not recorded yet is recorded here, which sends inputs of its own."""
        segments = [part.segment for part in parts]
        adapted = any(it.adapter is not None for it in segments)
        layers = self.layers(round_up(sum(len(it.tokens) for it in segments), ROWS), adapted=adapted)
        runs = Outputs.of(parts, draws, first).divided()
        return PreparedPass(segments, layers, runs, [self.choice.head(run, candidates) for run in runs])

    def layers(self, count: int, *, adapted: bool) -> RecordedLayers:
        """Return the layers at a number of rows, recorded over padding alone at their first use."""
        if (count, adapted) not in self._layers:
            plan = self._plan(count)
            inputs, adapters = self.inputs.rows(plan), self.adapters.of_rows(count, adapted=adapted)
            self.inputs.send(plan, [], NO_OUTPUTS, NO_MOVES)
            if self.states is not None:
                self.states.send([])
            replay = self.runtime.record(lambda: self.model.compute(plan, inputs, adapters))
            self._layers[count, adapted] = RecordedLayers(plan, adapters, replay)
        return self._layers[count, adapted]

    def send(
        self, layers: RecordedLayers, segments: Sequence[Segment], outputs: Outputs, moves: NDArray[np.int64] = NO_MOVES
    ) -> None:
        """Begin to copy the inputs of a pass to the device."""
        self.inputs.send(layers.plan, segments, outputs, moves)
        layers.adapters.send(segments)
        if self.states is not None:
            self.states.send(segments)

    def _take_features(self, prepared: PreparedPass, *, last: bool) -> None:
        """Keep the features of a pass. `last`: nothing of this call overwrites them."""
        if self._wanted is None:
            return
        used = sum(len(it.tokens) for it in prepared.segments)
        found = self.model.features[:used].flatten(1)
        if not self._wanted.all_rows:
            rows = np.concatenate([run.rows for run in prepared.runs])
            found = found.index_select(0, self.runtime.sent(rows))
        elif not last:
            found = found.clone()
        self._taken.append(found)
