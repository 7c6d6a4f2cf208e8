"""EAGLE heads in a drafter: an engine that drafts from the features that the verifier sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig, read_config, read_tokenizer_digest
from outrider.engine.heads.checkpoint_io import load_network, pack_linears
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.eagle_layer import EagleLayer
from outrider.engine.heads.embeddings import TargetEmbeddings, read_target_embeddings
from outrider.engine.heads.fed_texts import FedTexts, parent_rows, written_rows
from outrider.engine.heads.fusing import check_eagle
from outrider.engine.heads.loading import heads_dtype
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import SCRATCH, Engine, Traits
from outrider.engine.threads import TorchThreads
from outrider.engine.torch_layers.kv_cache import lazy_zeros


class EagleEngine(Engine):
    """An engine over EAGLE heads on a CPU.

    `feed` brings the features of a text (`FedTexts`). A node behind the text has the state that its parent's row has
    computed instead. A pass that continues a text drops the nodes behind it, so rows are never moved.
    """

    def __init__(
        self,
        network: Eagle | Eagle3,
        shape: HeadsConfig,
        embeddings: TargetEmbeddings,
        config: ModelConfig,
        digest: bytes,
        *,
        dtype: torch.dtype,
        slots: int,
        threads: int,
    ) -> None:
        """`config`: of the target; `digest`: of its tokenizer."""
        rows = config.context + SCRATCH
        if shape.own_head:
            embeddings = embeddings.below(shape.vocabulary)
        self._layer = EagleLayer(network, shape, embeddings, slots=slots, rows=rows)
        in_network = sum(parameter.numel() for parameter in network.parameters())
        parameters = in_network + (0 if shape.own_head else shape.width * shape.vocabulary)
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=rows,
                rows=rows,
                slots=slots,
                parameters=parameters,
                dtype=str(dtype).removeprefix("torch."),
                numerics="fast",
                tokenizer_digest=digest,
                eos_ids=config.eos_ids,
                weight_bytes=parameters * dtype.itemsize,
                kv_bytes=self._layer.kv_bytes,
                fed_width=shape.width,
                unpadded_vocabulary=embeddings.unpadded_vocabulary,
            )
        )
        pack_linears(network, dtype)
        self._before = lazy_zeros(slots, rows, shape.width, dtype=torch.bfloat16)  # fused features of the token before
        self._texts = FedTexts(slots, rows)
        self._computed: list[dict[int, Tensor]] = [{} for _ in range(slots)]  # by slot and row: its state, [width]
        self._threads = TorchThreads(threads)

    @classmethod
    def load(cls, folder: Path, target: Path, *, precise: bool, slots: int, threads: int) -> EagleEngine:
        """Load a folder's heads and both embeddings of `target`, whose layers are not read. Raises as `check_eagle`."""
        check_eagle(folder, target)
        torch.set_num_threads(threads)
        dtype = heads_dtype(precise=precise)
        shape, network = load_network(folder)
        assert isinstance(network, Eagle | Eagle3)
        embeddings, digest = read_target_embeddings(target, dtype), read_tokenizer_digest(target)
        return cls(network, shape, embeddings, read_config(target), digest, dtype=dtype, slots=slots, threads=threads)

    def feed(self, slot: int, start: int, rows: NDArray[np.uint16], *, restart: bool) -> None:
        rows = rows[: max(0, self.rows - start)]
        stop = start + len(rows)
        self._before[slot, start:stop] = torch.from_numpy(rows.astype(np.int16)).view(torch.bfloat16)
        self._texts.feed(slot, start, stop, restart=restart)

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        self._threads.prepare()
        present = [rest for segment in segments if (rest := self._texts.with_features(segment)) is not None]
        if not present:
            return np.empty((0, self.vocabulary), np.float32)
        with torch.inference_mode():
            states = torch.cat([self._states(segment) for segment in present])
            computed = self._layer.run([self._layer_segment(segment) for segment in present], states)
            first = 0
            for segment in present:
                self._remember(segment, computed[first : first + segment.outputs])
                first += segment.outputs
            return self._layer.logits(computed) if first else np.empty((0, self.vocabulary), np.float32)

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        raise ValueError(f"cannot move rows of slot {slot}: those of drafts are never kept")

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        with torch.inference_mode():
            self._layer.copy(source, target, self._texts.copy(source, target, rows))

    def _layer_segment(self, segment: Segment) -> Segment:
        """Return the segment for the layer, whose row 0 is the slot's first row with KV.

        The positions of its rows are those of their features' tokens.
        """
        before = segment.prefix - self._texts.base(segment.slot)
        return Segment(segment.slot, before, segment.tokens, segment.positions - 1, segment.mask, segment.outputs)

    def _states(self, segment: Segment) -> Tensor:
        """Return the states that a segment's rows continue: [rows, width]."""
        slot, end = segment.slot, self._texts.end(segment.slot)
        rows = written_rows(segment)
        text = self._before[slot, rows.start : min(rows.stop, end)].float()
        if rows.start < end:
            self._computed[slot].clear()  # the text continues, which drops the nodes behind it
        parents = zip(rows, parent_rows(segment), strict=True)
        above = [self._computed[slot][parent] for row, parent in parents if row >= end]
        return torch.cat([text, torch.stack(above)]) if above else text

    def _remember(self, segment: Segment, computed: Tensor) -> None:
        """Store the states of a segment's wanted rows, for the nodes below them."""
        rows = written_rows(segment)
        self._computed[segment.slot].update(zip(rows[len(rows) - len(computed) :], computed, strict=True))
