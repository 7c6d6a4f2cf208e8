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

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.noise import Draw
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights, read_config, read_tokenizer_digest
from outrider.engine.following import FollowingPass
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm
from outrider.engine.gpu.adapters.adapter_table import AdapterShape, AdapterTable, NoAdapterTable, check_adapters
from outrider.engine.gpu.attention.kv_memory import PagedKv, page_bytes, pages_for
from outrider.engine.gpu.attention.page_table import PAGE_ROWS
from outrider.engine.gpu.devices import Runtime, check_capability, check_device, fitting
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.passes.begun_pass import NextPass, PickedLogits
from outrider.engine.gpu.passes.llama_layers import LlamaLayers
from outrider.engine.gpu.passes.packing import OUTPUTS, ROWS, check_trees
from outrider.engine.gpu.passes.pass_runner import PassRunner
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.token_choice import VERIFIED
from outrider.engine.gpu.tree_growth import LEVELS, GrowingTree, TreeGrowth, grown_levels
from outrider.engine.gpu.weights import DeviceDtype, ModelWeights, load_weights
from outrider.engine.growth import LEVEL_ROWS, GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine, Traits
from outrider.engine.interface.features import Features
from outrider.engine.interface.logits import Logits
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.torch_layers.weights import WeightSource
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.heads.speculator import FollowingSpeculator

GREEDY = Draw(0, 0.0)


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
        runtime: Runtime,
        *,
        slots: int,
        rows: int,
        pages: int,
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
        kv = PagedKv(config, weights.embedding.dtype, runtime, slots=slots, rows=rows, pages=pages)
        alone = runtime.group.shard.of == 1
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
                kv_bytes=kv.cache.nbytes,
                kv_tokens=pages * PAGE_ROWS if kv.bounded else 0,
                samples_tokens=True,
                restricts_tokens=True,
                frees_host=runtime.device.type == "cuda",
                grows_trees=alone,  # only rank 0 has the logits
                begins_next_pass=alone and features is None,
                features=features,
                unpadded_vocabulary=config.unpadded_vocabulary,
            )
        )
        self.speculator: FollowingSpeculator | None = None
        self.eagle = eagle
        self.runtime = runtime
        self.kv = kv
        self.adapters: AdapterTable | NoAdapterTable = (
            NoAdapterTable() if adapters is None else AdapterTable(adapters, slots, runtime.kernels)
        )
        self.passes = PassRunner(
            config,
            weights,
            kv,
            runtime,
            positions=self.positions,
            adapters=self.adapters,
            features=features,
            states=states,
            make_layers=make_layers,
        )
        self.growth = TreeGrowth(min(CANDIDATES, config.vocabulary), self.passes)
        self.next_pass = NextPass(self.passes)

    @classmethod
    def load(cls, path: Path, settings: EngineSettings) -> DeviceEngine:
        """Load a checkpoint folder, or a rank's part of it.

        Raises CheckpointError, and ConfigError for a device that is missing, too small or without a compiler, and for a
        type of weights that is not supported.
        """
        if settings.numerics != "fast":
            raise ConfigError(
                f"numerics: {settings.numerics} is not possible with device {settings.device}; use fast, or device cpu"
            )
        check_device(settings.device)
        config = read_config(path).within_windows()
        if not config.like_llama:
            raise ConfigError(
                f"device: {config.model_type} does not run on {settings.device}; use cpu, or a .gguf file with backend "
                "llama.cpp and device gpu"
            )
        weights = Weights(path, settings.progress)
        engine = cls.of(weights, config, read_tokenizer_digest(path), settings)
        weights.finish()
        return engine

    @classmethod
    def of(cls, source: WeightSource, config: ModelConfig, digest: bytes, settings: EngineSettings) -> DeviceEngine:
        """Make an engine over weights from any source. Raises as `load`."""
        dtype, slots, group = settings.dtype, settings.slots, settings.group
        kept = settings.kept_layers(config.layers)
        device = check_device(settings.device)
        if dtype not in get_args(DeviceDtype):
            raise ConfigError(f"dtype: is {dtype}, must be float32, bfloat16, float8 or int4 with device {device}")
        dtype = cast(DeviceDtype, dtype)
        check_capability(device, dtype)
        runtime = Runtime.on(device, group)
        rows = settings.rows_for(config.context)
        part = group.shard.config(replace(config, layers=len(kept)))
        with torch.inference_mode(), fitting(device):
            weights = load_weights(source, config, group.shard, kept, device, dtype)
            kind = weights.embedding.dtype
            adapters = eagle = None
            page, reserved = page_bytes(part, kind), 0
            if settings.adapters:
                form = AdapterForm.of(part, kind, device)
                adapters = AdapterShape(config, group.shard, kept, form, settings.adapters)
                reserved += adapters.reserved
            if settings.heads is not None:
                shared = weights if group.shard.of == 1 else None
                eagle = EagleModel.read(settings.heads, config, source, kind, device, shared)
                page, reserved = page + eagle.page_bytes, reserved + eagle.reserved(slots)
            return cls(
                part,
                weights,
                digest,
                runtime,
                slots=slots,
                rows=rows,
                pages=pages_for(device, page, slots, rows, settings.kv_memory, group, reserved),
                adapters=adapters,
                features=settings.features,
                eagle=eagle,
            )

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        return self._run(segments, [None] * len(segments), 0).all()

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        logits = None if best else self.next_pass.take(segments, draws)
        if logits is not None:
            logits.source.fetch()
            return logits
        found = self._run(segments, draws, max(VERIFIED, min(best, self.vocabulary)) if any(draws) else 0)
        found.fetch()
        return found

    def run_on(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], following: FollowingPass
    ) -> tuple[Logits, frozenset[int]]:
        if not self.begins_next_pass:
            return super().run_on(segments, draws, following)
        logits = self.next_pass.take(segments, draws)
        if logits is None:
            logits = PickedLogits(self._run(segments, draws, VERIFIED, kept=True), np.arange(len(segments)))
        return logits, self.next_pass.begin(segments, draws, following, logits)

    def grow(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], growths: Sequence[Growth | None], levels: int
    ) -> tuple[Logits, list[GrownLevel]]:
        trees = GrowingTree.of(segments, draws, growths)
        for tree in trees:
            tree.check(levels, self.rows)
        rows = {tree.segment.slot: levels * LEVEL_ROWS for tree in trees}
        logits = self._run(segments, draws, self.growth.candidates, kept=True, growing=rows)
        results = self.growth.run(trees, levels, logits.only_choices)
        logits.fetch()
        return logits, grown_levels(results, len(trees))

    def hidden(self) -> Tensor:
        return self.passes.features

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        self.next_pass.forget(slot)
        self.kv.table.move(slot, source, destination)

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        self.next_pass.forget(target)
        self.kv.table.copy(source, target, rows)
        if self.speculator is not None:
            self.speculator.copy(source, target, rows)

    def release(self, slot: int, rows: int) -> None:
        self.next_pass.forget(slot)
        self.kv.table.release(slot, rows)
        if self.speculator is not None:
            self.speculator.release(slot, rows)

    def follow(self, speculator: FollowingSpeculator) -> None:
        """Have heads follow the KV of all slots."""
        self.speculator = speculator

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        return (self.kv.table.needed(slot, first, end), self.kv.table.free) if self.kv.bounded else None

    @property
    def kv_bytes_taken(self) -> int:
        """Bytes of all pages in use; a page that several slots share counts once."""
        return self.kv.bytes_taken

    def record(self) -> None:
        """Record passes of all numbers of rows, so that none is recorded while texts wait, which takes some seconds. An
        engine for adapters records them twice, with the adapters' kernels and without.

        The largest are first: smaller ones then fit into the memory that they share. All ranks of a group record at
        once. Raises ConfigError when the device has too little memory.
        """
        passes = self.passes
        self.runtime.group.barrier()
        with self.runtime.computing(), fitting(self.runtime.device):
            for count in reversed(ROWS):
                for adapted in self.adapters.passes:
                    passes.layers(count, adapted=adapted)
                for candidates in (CANDIDATES, VERIFIED, 0) if count in OUTPUTS else ():
                    passes.choice.record(count, min(candidates, self.vocabulary))
            for count in reversed(LEVELS) if self.grows_trees else ():
                self.growth.choose(passes.layers(count, adapted=False).plan)
            if self.speculator is not None:
                self.speculator.record()

    def check_segments(self, segments: Sequence[Segment]) -> None:
        super().check_segments(segments)
        check_trees(segments)
        check_adapters(segments, self.adapters.form)

    def _run(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], candidates: int, **more: Any
    ) -> DeviceLogits:
        """Run the passes of a call; see `PassRunner.run`."""
        self.check_segments(segments)
        self.next_pass.begun = None  # discard a pass started ahead: it may use these slots
        return self.passes.run(segments, draws, candidates, **more)

    def _try(self, segment: Segment) -> None:
        self.sample([segment], [GREEDY])
