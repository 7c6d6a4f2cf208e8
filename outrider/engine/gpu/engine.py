"""The engine on an accelerator, for the Llama family. The host waits only for the few numbers that a step needs.

A pass takes the rows of all segments, one behind another, and runs at one of a few numbers of rows (`packing`). One
copy brings all of its inputs to the device (`input_buffers`). The rest is recorded once for each number of rows, and
replayed as one call (`cuda_graphs`): moves of committed cache rows, and the layers with their attention
(`tree_attention`). A second recording, by the number of rows that want logits, has the head and the choice of tokens
under shared noise. Only the chosen tokens return to the host. Logits stay on the device until a row is used, by
contracts with filters or penalties and by drafters.

With `device="cpu"` the same code runs on operations of torch and without recordings, where `CpuEngine` does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.noise import Draw
from outrider.engine.adapters.low_rank import AdapterFiles, LowRankAdapter, most_bytes
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.following import FollowingPass
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm
from outrider.engine.gpu.adapters.adapter_table import (
    AdaptedPass,
    AdapterShape,
    AdapterTable,
    PlainPass,
    check_adapters,
)
from outrider.engine.gpu.attention.kv_memory import page_bytes, pages_for
from outrider.engine.gpu.attention.page_table import PAGE_ROWS, PageTable, pages_of
from outrider.engine.gpu.attention.tree_attention import AttentionPlan
from outrider.engine.gpu.devices import check_capability, check_device, fitting, kernels_for
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.kernels import Kernels
from outrider.engine.gpu.passes.begun_pass import BegunPass, NextRows, PickedLogits, chosen_tokens
from outrider.engine.gpu.passes.cuda_graphs import Recorder, Replay, recorder_for
from outrider.engine.gpu.passes.input_buffers import (
    MOST_MOVES,
    NO_OUTPUTS,
    InputBuffers,
    Outputs,
    moves_of,
)
from outrider.engine.gpu.passes.llama_layers import LlamaLayers
from outrider.engine.gpu.passes.packing import OUTPUTS, ROWS, PassPart, check_trees, packed, round_up
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.token_choice import VERIFIED, Head, TokenChoice
from outrider.engine.gpu.tree_growth import LEVELS, GrowingTree, TreeGrowth, grown_levels
from outrider.engine.gpu.weights import DeviceDtype, ModelWeights, load_weights
from outrider.engine.growth import LEVEL_ROWS, GrownLevel, Growth
from outrider.engine.heads.speculator import FollowingSpeculator
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import SCRATCH, Engine, Numerics, Traits, check_sizes
from outrider.engine.interface.features import Features
from outrider.engine.interface.logits import Logits
from outrider.engine.layer_selection import kept_layers
from outrider.engine.tensor_parallel.group import ALONE, TensorGroup
from outrider.engine.threads import TorchThreads
from outrider.engine.torch_layers.kv_cache import lazy_zeros
from outrider.engine.torch_layers.weights import WeightSource
from outrider.errors import ConfigError

GREEDY = Draw(0, 0.0)
_NO_MOVES = np.empty((2, 0), np.int64)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The recorded layers, for one number of rows, with adapters or without."""

    plan: AttentionPlan
    adapters: PlainPass | AdaptedPass
    replay: Replay


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that is ready to be launched."""

    segments: list[Segment]
    layers: _Layers
    runs: list[Outputs]  # at least one run; a run may have no outputs
    heads: list[Head | None]  # of each run


class DeviceEngine(Engine):
    """A model on a device, or a rank's part of it.

    Weights, KV and outputs of linears are bfloat16 or float32; with float8 or int4 the layers' linears have weights of
    8 or 4 bits, and all else is bfloat16. Residual stream, norms, rotations and logits are float32. A row's last bits
    depend on its pass's number of rows, and on its place in a tile of attention. In a group of ranks only rank 0 has
    the logits.
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
        pages: int,
        group: TensorGroup,
        kernels: Kernels,
        recorder: Recorder,
        adapters: AdapterShape | None = None,
        features: Features | None = None,
        states: RowStates | None = None,
        eagle: EagleModel | None = None,
        make_layers: Callable[..., LlamaLayers] = LlamaLayers,
    ) -> None:
        """`config`: the shape of this rank's part; `pages`: of KV, those of all slots together; `adapters`: None: the
        engine has none; `features`: that passes return; `states`: that the rows of heads continue; `eagle`: heads that
        may follow this engine; `make_layers`: called as `LlamaLayers` is.
        """
        dtype = weights.embedding.dtype
        shape = (config.layers, 2, pages + 1, config.kv_heads, PAGE_ROWS, config.head_dim)  # one for padding
        self._cache = (
            lazy_zeros(*shape, dtype=dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._table = PageTable(slots, rows, pages)
        self.pages = pages
        self.eagle = eagle
        self.speculator: FollowingSpeculator | None = None
        self._bounded = pages < slots * pages_of(rows)
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=max(rows, config.context),
                rows=rows,
                slots=slots,
                parameters=weights.parameters,
                dtype=weights.dtype,
                numerics="fast",
                tokenizer_digest=digest,
                eos_ids=config.eos_ids,
                weight_bytes=weights.bytes_of_a_pass,
                kv_bytes=self._cache.nbytes,
                kv_tokens=pages * PAGE_ROWS if self._bounded else 0,
                samples_tokens=True,
                restricts_tokens=True,
                frees_host=device.type == "cuda",
                grows_trees=group.shard.of == 1,  # only rank 0 has the logits
                begins_next_pass=group.shard.of == 1 and features is None,
                features=features,
                unpadded_vocabulary=config.unpadded_vocabulary,
                adapter_bytes=0 if adapters is None else most_bytes(adapters.config),
            )
        )
        self.device = device
        self._threads = TorchThreads(torch.get_num_threads())
        self._config = config
        self._group = group
        self._kernels = kernels
        self.recorder = recorder
        plans = [self._plan(count) for count in ROWS]
        self._inputs = InputBuffers(plans[-1], self._table, device)
        self._model = make_layers(
            config,
            weights,
            self._cache,
            positions=self.positions,
            plans=plans,
            features=features,
            group=group,
            kernels=kernels,
            device=device,
        )
        self._taken: list[Tensor] = []  # features of the last call's rows
        self._states = states
        self._adapters = None if adapters is None else AdapterTable(adapters, slots, kernels)
        self._layers: dict[tuple[int, bool], _Layers] = {}  # by rows, and whether some have an adapter
        self._begun: BegunPass | None = None  # behind the last call
        self._choice = TokenChoice(
            config,
            slots,
            parts=self._model.logit_parts,
            inputs=self._inputs,
            kernels=kernels,
            group=group,
            record=lambda work: self.recorder.record(work),
            device=device,
        )
        self._growth = TreeGrowth(
            min(CANDIDATES, config.vocabulary),
            inputs=self._inputs,
            table=self._table,
            states=states,
            record=lambda work: self.recorder.record(work),
            device=device,
        )

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
        progress: Callable[[float], None] | None = None,
        kv_memory: int | None = None,
        adapters: int = 0,
        features: Features | None = None,
        heads: Path | None = None,
    ) -> DeviceEngine:
        """Load a checkpoint folder, or a rank's part of it; for the other parameters see `load_engine`.

        `kv_memory`: bytes for the KV of all slots together; None: as much as they can take, or the device has.
        `adapters`: most that can be held, for which KV leaves memory; 0: `load_adapter` is refused. `heads`: a folder
        of EAGLE heads that are read, too, for `DeviceEagleDrafts`.

        Raises CheckpointError, and ConfigError for a device that is missing, too small or without a compiler, and for a
        type of weights that is not supported.
        """
        if numerics != "fast":
            raise ConfigError(f"numerics: {numerics} is not possible with device {device}; use fast, or device cpu")
        check_device(device)
        weights = Weights(path, progress)
        config = read_config(path)
        kept = kept_layers(config.layers, layers, skip)
        if features is not None:
            features.check(len(kept))
        engine = cls.of(
            weights,
            config,
            read_tokenizer_digest(path),
            device=device,
            dtype=dtype,
            kept=kept,
            slots=slots,
            rows=rows,
            group=group,
            kv_memory=kv_memory,
            adapters=adapters,
            features=features,
            heads=heads,
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
        kv_memory: int | None = None,
        adapters: int = 0,
        features: Features | None = None,
        heads: Path | None = None,
    ) -> DeviceEngine:
        """Make an engine over weights from any source; for the parameters see `load`."""
        check_sizes(slots, rows)
        torch_device = check_device(device)
        if dtype not in get_args(DeviceDtype):
            raise ConfigError(f"dtype: is {dtype}, must be float32, bfloat16, float8 or int4 with device {device}")
        check_capability(torch_device, cast(DeviceDtype, dtype))
        kernels = kernels_for(torch_device)
        kept = range(config.layers) if kept is None else kept
        rows = config.context + SCRATCH if rows is None else rows
        part = group.shard.config(replace(config, layers=len(kept)))
        with torch.inference_mode(), fitting(torch_device):
            weights = load_weights(source, config, group.shard, kept, torch_device, cast(DeviceDtype, dtype))
            shape = None
            if adapters:
                form = AdapterForm.of(part, weights.embedding.dtype, torch_device)
                shape = AdapterShape(config, group.shard, kept, form, adapters)
            reserved = 0 if shape is None else shape.reserved
            page, eagle = page_bytes(part, weights.embedding.dtype), None
            if heads is not None:
                shared = weights if group.shard.of == 1 else None
                eagle = EagleModel.read(heads, config, source, weights.embedding.dtype, torch_device, shared)
                page, reserved = page + eagle.page_bytes, reserved + eagle.reserved(slots)
            return cls(
                part,
                weights,
                digest,
                device=torch_device,
                slots=slots,
                rows=rows,
                pages=pages_for(torch_device, page, slots, rows, kv_memory, group, reserved),
                group=group,
                kernels=kernels,
                recorder=recorder_for(torch_device),
                adapters=shape,
                features=features,
                eagle=eagle,
            )

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        return self._run(segments, [None] * len(segments), 0).all()

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        logits = None if best else self._take_begun(segments, draws)
        if logits is not None:
            logits.source.fetch()
            return logits
        found = self._run(segments, draws, max(VERIFIED, min(best, self.vocabulary)) if any(draws) else 0)
        found.fetch()
        return found

    def run_on(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], following: FollowingPass
    ) -> tuple[Logits, frozenset[int]]:
        logits = self._take_begun(segments, draws)
        if logits is None:
            logits = PickedLogits(self._run(segments, draws, VERIFIED, kept=True), np.arange(len(segments)))
        rows = NextRows.of(segments, draws, following, self.rows)
        begin = None if rows is None else self._prepare_following(rows, logits)
        logits.source.fetch()
        tokens = None if rows is None or begin is None else chosen_tokens(logits, rows)
        if rows is None or begin is None or tokens is None or rows.all_end(tokens, following) or not following.wanted():
            return logits, frozenset()
        self._begun = BegunPass.of(rows, tokens, begin())
        return logits, frozenset(self._begun.rows)

    def grow(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], growths: Sequence[Growth | None], levels: int
    ) -> tuple[Logits, list[GrownLevel]]:
        trees = GrowingTree.of(segments, draws, growths)
        for tree in trees:
            tree.check(levels, self.rows)
        rows = {tree.segment.slot: levels * LEVEL_ROWS for tree in trees}
        logits = self._run(segments, draws, self._growth.candidates, kept=True, growing=rows)
        results = self._grow(trees, levels, logits.only_choices)
        logits.fetch()
        return logits, grown_levels(results, len(trees))

    def load_adapter(self, folder: Path) -> tuple[object, LowRankAdapter]:
        if self._adapters is None:
            raise ConfigError("adapters: this engine was loaded without; start the verifier with --adapters")
        return super().load_adapter(folder)

    def pack_adapter(self, files: AdapterFiles) -> tuple[object, LowRankAdapter]:
        assert self._adapters is not None  # else `adapter_bytes` is 0
        return self._adapters.load(files)

    def hidden(self) -> Tensor:
        return self._taken[0] if len(self._taken) == 1 else torch.cat(self._taken)

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        self._forget_begun(slot)
        self._table.move(slot, source, destination)

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        self._forget_begun(target)
        self._table.copy(source, target, rows)
        if self.speculator is not None:
            self.speculator.copy(source, target, rows)

    def release(self, slot: int, rows: int) -> None:
        self._forget_begun(slot)
        self._table.release(slot, rows)
        if self.speculator is not None:
            self.speculator.release(slot, rows)

    def follow(self, speculator: FollowingSpeculator) -> None:
        """Have heads follow the KV of all slots."""
        self.speculator = speculator

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        return (self._table.needed(slot, first, end), self._table.free) if self._bounded else None

    @property
    def row_bytes(self) -> int:
        """Bytes of the KV of one row."""
        return self._cache.nbytes // (self._cache.shape[2] * PAGE_ROWS)

    @property
    def kv_bytes_taken(self) -> int:
        """Bytes of all pages in use; a page that several slots share counts once."""
        return (self._table.pages - self._table.free) * PAGE_ROWS * self.row_bytes

    def record(self) -> None:
        """Record passes of all numbers of rows, so that none is recorded while texts wait, which takes some seconds. An
        engine for adapters records them twice, with the adapters' kernels and without.

        The largest are first: smaller ones then fit into the memory that they share. All ranks of a group record at
        once. Raises ConfigError when the device has too little memory.
        """
        self._group.barrier()
        with torch.inference_mode(), self._current_device(), fitting(self.device):
            for count in reversed(ROWS):
                for adapted in (False,) if self._adapters is None else (False, True):
                    self._layers_for(count, adapted)
                for candidates in (CANDIDATES, VERIFIED, 0) if count in OUTPUTS else ():
                    self._choice.record(count, min(candidates, self.vocabulary))
            for count in reversed(LEVELS) if self.grows_trees else ():
                self._growth.choose(self._layers_for(count, adapted=False).plan)
            if self.speculator is not None:
                self.speculator.record()

    def check_segments(self, segments: Sequence[Segment]) -> None:
        super().check_segments(segments)
        check_trees(segments)
        check_adapters(segments, None if self._adapters is None else self._adapters.form)

    def _run(
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
        self.check_segments(segments)
        self._threads.prepare()
        result = DeviceLogits(self.vocabulary, [segment.outputs for segment in segments])
        self._begun, self._taken = None, []  # discard a pass started ahead: it may use these slots
        with torch.inference_mode(), self._current_device():
            passes = [self._prepare(parts, draws, candidates, result.first) for parts in packed(segments)]
            for it in segments:
                end = it.prefix + it.span
                self._table.prepare(it.slot, end - len(it.tokens), end + growing.get(it.slot, 0))
            moves = self._table.take_moves()
            if moves.shape[1] > moves_of(passes[0].layers.plan.rows):
                self._move(moves)
                moves = _NO_MOVES
            for prepared in passes:
                self._inputs.send(prepared.layers.plan, prepared.segments, prepared.runs[0], moves)
                prepared.layers.adapters.send(prepared.segments)
                self._send_states(prepared.segments)
                moves = _NO_MOVES
                for index, (run, head) in enumerate(zip(prepared.runs, prepared.heads, strict=True)):
                    chosen = self._choice.send(run, candidates)
                    if index:
                        self._inputs.send_outputs(run)
                    else:
                        prepared.layers.replay()
                    if head is not None:
                        last = not kept and prepared is passes[-1] and index == len(prepared.runs) - 1
                        self._choice.compute(head, run, chosen, result, last=last)
                self._take_features(prepared, last=prepared is passes[-1])
            self._group.finish()
        return result

    def _take_begun(self, segments: Sequence[Segment], draws: Sequence[Draw | None]) -> PickedLogits | None:
        """Return the logits of these rows, if the last call has begun them."""
        begun, self._begun = self._begun, None
        return None if begun is None else begun.logits_of(segments, draws)

    def _forget_begun(self, slot: int) -> None:
        """Have a row that was begun computed anew, because its slot changes."""
        if self._begun is not None:
            self._begun.rows.pop(slot, None)

    def _prepare_following(self, rows: NextRows, before: PickedLogits) -> Callable[[], DeviceLogits] | None:
        """Upload the next pass's inputs. Return a function that starts it, or None if it cannot be pipelined.

        Its tokens are taken over on the device, where this pass writes them.
        """
        choices, count = before.source.only_choices, len(rows.segments)
        if choices is None or count > OUTPUTS[-1] or (self._bounded and self._table.free < 2 * count):
            return None
        with torch.inference_mode(), self._current_device():
            result = DeviceLogits(self.vocabulary, [1] * count)
            (parts,) = packed(rows.segments)
            prepared = self._prepare(parts, rows.draws, VERIFIED, result.first)
            if len(prepared.runs) > 1:
                return None
            (run,), (head,) = prepared.runs, prepared.heads
            assert head is not None
            for it in rows.segments:
                self._table.prepare(it.slot, it.prefix, it.prefix + 1)
            self._move(self._table.take_moves())  # whether the pass begins or not
            self._inputs.send(prepared.layers.plan, rows.segments, run, _NO_MOVES)
            prepared.layers.adapters.send(rows.segments)
            chosen = self._choice.send(run, VERIFIED)
            tokens = self._inputs.rows(prepared.layers.plan).tokens
            sources = self.sent(before.rows[rows.sources])
            tokens[:count] = choices[sources, 0].long().clamp(0, self.vocabulary - 1)

        def begin() -> DeviceLogits:
            with torch.inference_mode(), self._current_device():
                prepared.layers.replay()
                self._choice.compute(head, run, chosen, result, last=False)
            return result

        return begin

    def _grow(self, trees: Sequence[GrowingTree], levels: int, choices: Tensor | None) -> list[Tensor]:
        """Begin to run further levels. `choices`: the candidates of the first one, None if they are not together.

        Return what `TreeGrowth.add` does for each level.
        """
        if choices is None or not trees or not TreeGrowth.fits(trees):
            return []
        growth, outputs = self._growth, TreeGrowth.outputs_of(trees)
        with torch.inference_mode(), self._current_device():
            adapted = any(tree.segment.adapter is not None for tree in trees)
            layers = self._layers_for(TreeGrowth.rows_of(len(trees)), adapted)
            head = self._choice.head(outputs, growth.candidates)
            assert head is not None
            assert head.choices is not None
            choose = growth.choose(layers.plan)
            segments = [tree.later(levels) for tree in trees]
            self._inputs.send(layers.plan, segments, outputs, _NO_MOVES)
            layers.adapters.send(segments)
            self._send_states(segments)
            self._choice.send(outputs, growth.candidates)
            growth.send(trees, levels)
            growth.begin(choices, layers.plan.rows)
            results = []
            for _ in range(levels):
                choose()
                layers.replay()
                head.replay()
                results.append(growth.add(head.choices))
        return results

    def _take_features(self, prepared: _Pass, *, last: bool) -> None:
        """Keep the features of a pass. `last`: nothing of this call overwrites them."""
        if self.features is None:
            return
        used = sum(len(it.tokens) for it in prepared.segments)
        found = self._model.features[:used].flatten(1)
        if not self.features.all_rows:
            rows = np.concatenate([run.rows for run in prepared.runs])
            found = found.index_select(0, self.sent(rows))
        elif not last:
            found = found.clone()
        self._taken.append(found)

    def _prepare(
        self, parts: Sequence[PassPart], draws: Sequence[Draw | None], candidates: int, first: Sequence[int]
    ) -> _Pass:
        """Find what a pass needs. What is not recorded yet is recorded here, which sends inputs of its own."""
        segments = [part.segment for part in parts]
        adapted = any(it.adapter is not None for it in segments)
        layers = self._layers_for(round_up(sum(len(it.tokens) for it in segments), ROWS), adapted)
        runs = Outputs.of(parts, draws, first).divided()
        return _Pass(segments, layers, runs, [self._choice.head(run, candidates) for run in runs])

    def _layers_for(self, count: int, adapted: bool) -> _Layers:
        """Return the layers at a number of rows, recorded over padding alone at their first use."""
        if (count, adapted) not in self._layers:
            plan = self._plan(count)
            inputs = self._inputs.rows(plan)
            adapters = self._adapters.of_rows(count) if adapted and self._adapters is not None else PlainPass()
            self._inputs.send(plan, [], NO_OUTPUTS, _NO_MOVES)
            self._send_states([])
            replay = self.recorder.record(lambda: self._model.compute(plan, inputs, adapters))
            self._layers[count, adapted] = _Layers(plan, adapters, replay)
        return self._layers[count, adapted]

    def _send_states(self, segments: Sequence[Segment]) -> None:
        """Begin to copy what the rows of a pass continue, in an engine of heads."""

    def _plan(self, count: int) -> AttentionPlan:
        config = self._config
        return AttentionPlan.of(
            count,
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            dtype=self._cache.dtype,
            segments=2 * self.slots,  # a chain and the tree behind it may be two
            text_pages=pages_of(self.rows),
        )

    def _move(self, moves: NDArray[np.int64]) -> None:
        """Move cache rows outside of a pass. The host does not wait for it.

        Rows go to places that no move reads first, some at a time, because a kernel holds all rows that it moves.
        """
        sources, targets = moves
        free = ~np.isin(targets, sources)
        copies, rest = moves[:, free], moves[:, ~free]
        parts = [copies[:, at : at + MOST_MOVES] for at in range(0, copies.shape[1], MOST_MOVES)]
        for part in (*parts, rest) if rest.size else parts:
            self._kernels.move(self._cache, *self.sent(np.ascontiguousarray(part)))

    def sent(self, numbers: NDArray[np.int64]) -> Tensor:
        """Return numbers that are on their way to the device."""
        host = torch.from_numpy(numbers)
        # torch keeps pinned memory until the copy has read it.
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _current_device(self) -> AbstractContextManager[object]:
        """Make this engine's device the current one, which torch keeps for each thread."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _try(self, segment: Segment) -> None:
        self.sample([segment], [GREEDY])
