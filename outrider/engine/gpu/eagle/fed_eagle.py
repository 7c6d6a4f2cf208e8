"""EAGLE heads in a drafter on a device, over the fused features that the verifier sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.engine.checkpoints.checkpoint import Weights, read_config, read_tokenizer_digest
from outrider.engine.gpu.attention.kv_memory import pages_for
from outrider.engine.gpu.attention.page_table import pages_of
from outrider.engine.gpu.devices import Runtime, check_device, fitting
from outrider.engine.gpu.eagle.eagle import DeviceEagle
from outrider.engine.gpu.eagle.eagle_model import EagleModel
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.growth import GrownLevel, Growth
from outrider.engine.heads.fed_texts import FedTexts
from outrider.engine.heads.fusing import check_eagle
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import SCRATCH
from outrider.engine.interface.logits import HostLogits, Logits
from outrider.engine.tensor_parallel.group import ALONE
from outrider.errors import ConfigError


class FedEagle(DeviceEagle):
    """An engine over EAGLE heads whose texts' features `feed` brings.

    The rows of a slot are counted from its first row that has features.
    """

    def __init__(
        self, model: EagleModel, digest: bytes, *, device: torch.device, slots: int, rows: int, pages: int
    ) -> None:
        """`digest`: of the target's tokenizer."""
        self._texts = FedTexts(slots, rows)
        super().__init__(model, digest, Runtime.on(device), slots=slots, rows=rows, pages=pages, base=self._texts.base)
        self.fed_width = model.config.width

    @classmethod
    def load_heads(cls, folder: Path, target: Path, *, device: str, precise: bool, slots: int) -> FedEagle:
        """Load a folder's heads and both embeddings of `target`, whose layers are not read.

        Raises as `check_eagle`, and ConfigError for a device that is missing or too small.
        """
        shape = check_eagle(folder, target)
        place, dtype = check_device(device), torch.float32 if precise else torch.bfloat16
        whole = read_config(target)
        rows = whole.context + SCRATCH
        with torch.inference_mode(), fitting(place):
            model = EagleModel.read(folder, whole, Weights(target), dtype, place)
            reserved = RowStates.bytes_of(slots, rows, shape.width, dtype)
            pages = pages_for(place, model.page_bytes, slots, rows, None, ALONE, reserved)
            if pages < slots * pages_of(rows):
                raise ConfigError(
                    f"heads: {place} has too little memory for {slots} texts of {whole.context} tokens; lower slots"
                )
            return cls(model, read_tokenizer_digest(target), device=place, slots=slots, rows=rows, pages=pages)

    def feed(self, slot: int, start: int, rows: NDArray[np.uint16], *, restart: bool) -> None:
        rows = rows[: max(0, self.rows - start)]
        stop = start + len(rows)
        with torch.inference_mode():
            numbers = self.states.fed_numbers(slot, np.arange(start, stop))
            device = self.runtime.device
            bits = torch.from_numpy(rows.astype(np.int16)).to(device).view(torch.bfloat16)
            self.states.feed(torch.from_numpy(numbers).to(device), bits)
        self.states.end(slot, stop)
        self._texts.feed(slot, start, stop, restart=restart)

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        present = self._present(segments)
        return super().forward(present) if present else np.empty((0, self.vocabulary), np.float32)

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        self.check_segments(segments)
        present = self._present(segments)
        if not present:
            return HostLogits(np.empty((0, self.vocabulary), np.float32))
        by_slot = dict(zip((it.slot for it in segments), draws, strict=True))
        return super().sample(present, [by_slot[it.slot] for it in present], best)

    def grow(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], growths: Sequence[Growth | None], levels: int
    ) -> tuple[Logits, list[GrownLevel]]:
        self.check_segments(segments)
        given = {it.slot: (draw, growth) for it, draw, growth in zip(segments, draws, growths, strict=True)}
        present = self._present(segments)
        drawn = [given[it.slot][0] for it in present]
        shifted = [self._shifted(it.slot, given[it.slot][1]) for it in present]
        return super().grow(present, drawn, shifted, levels)

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        super().copy(source, target, self._texts.copy(source, target, rows))

    def release(self, slot: int, rows: int) -> None:
        super().release(slot, max(0, rows - self._texts.base(slot)))

    def _present(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the rows that have features, or continue computed states, counted from each slot's first one."""
        found = [rest for segment in segments if (rest := self._texts.with_features(segment)) is not None]
        return [replace(it, prefix=it.prefix - self._texts.base(it.slot)) for it in found]

    def _shifted(self, slot: int, growth: Growth | None) -> Growth | None:
        return None if growth is None else replace(growth, base=growth.base - self._texts.base(slot))
