"""The engine on llama.cpp, for GGUF files of any family, on any device that llama.cpp was built for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.checkpoint import read_eos_ids, read_tokenizer_digest
from outrider.engine.checkpoints.gguf.config import gguf_outline, kv_values
from outrider.engine.checkpoints.gguf.header import read_gguf
from outrider.engine.checkpoints.stored_tensors import main_kind
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import PAGE, Engine, Traits, check_kv_memory
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.llama_cpp.library import LlamaContext, LlamaModel
from outrider.engine.llama_cpp.sequences import BatchToken, SlotSequences
from outrider.errors import CheckpointError, ConfigError

LEAVES = 16  # sequences of a slot, on average
MOST_SEQUENCES = 256  # of llama.cpp


class LlamaCppEngine(Engine):
    """A GGUF file in llama.cpp. A pass is one call of it for all sessions.

    A row's last bits depend on the other rows of its call. Weights have the types of the file; KV is float32 where they
    are, else float16.
    """

    @classmethod
    def load(cls, path: Path, it: EngineSettings) -> LlamaCppEngine:
        """Raises CheckpointError and ConfigError."""
        file, on_device = read_gguf(path), it.device != "cpu"
        context = gguf_outline(file).context
        rows, kind = it.rows_for(context), main_kind(file.tensors.values())
        cell = kv_values(file) * (4 if kind == "f32" else 2)
        if it.slots >= MOST_SEQUENCES:
            raise ConfigError(f"slots: llama.cpp has sequences for at most {MOST_SEQUENCES - 1}; give fewer")
        if it.kv_memory is not None:
            check_kv_memory(it.kv_memory, cell * rows, rows)
        model = LlamaModel(path, on_device=on_device)
        if model.recurrent or not cell:
            model.close()
            raise CheckpointError(f"{path}: has a state that cannot be taken back, so it verifies no drafts")
        cells = it.slots * rows
        if it.kv_memory is not None:
            cells = min(cells, it.kv_memory // cell)
        elif not on_device:
            cells = min(cells, max(rows, host_memory() // 2 // cell))
        sequences = min(MOST_SEQUENCES, it.slots * LEAVES + 1)
        threads = it.threads or os.cpu_count() or 1
        kv = LlamaContext(model, cells, sequences, threads, on_device=on_device, precise=kind == "f32")
        engine = cls(model, kv, _traits(path, model, it, kind, context, cells, cell), cells, sequences)
        if it.progress is not None:
            it.progress(1.0)
        return engine

    def __init__(self, model: LlamaModel, context: LlamaContext, traits: Traits, cells: int, sequences: int) -> None:
        super().__init__(traits)
        self._model = model
        self._cells = cells  # tokens whose KV there is memory for
        self._context = context
        self._sequences = SlotSequences(context, self.slots, sequences)

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        logits = np.empty((sum(segment.outputs for segment in segments), self.vocabulary), np.float32)
        tokens, lone, first = list[BatchToken](), [], 0
        for segment in segments:
            together, apart = self._sequences.place(segment, first)
            tokens += together
            lone += apart
            first += segment.outputs
        self._context.decode(tokens, logits)
        for path in lone:
            if path.source is not None:
                self._context.copy(path.source, self._sequences.lone, path.end)
            for token in path.tokens:
                token.sequences = [self._sequences.lone]
            self._context.decode(path.tokens, logits)
            self._context.remove(self._sequences.lone, 0)
        return logits

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        self._sequences.move(slot, source, destination)

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        self._sequences.copy(source, target, rows)

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        if not self.kv_tokens:
            return None
        held = [self._sequences.held(each) for each in range(self.slots)]
        return -(-max(0, end - held[slot]) // PAGE), (self._cells - sum(held)) // PAGE

    def release(self, slot: int, rows: int) -> None:
        self._sequences.release(slot, rows)

    def close(self) -> None:
        self._context.close()
        self._model.close()


def host_memory() -> int:
    """Return how many bytes this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _traits(
    path: Path, model: LlamaModel, it: EngineSettings, kind: str, context: int, cells: int, cell: int
) -> Traits:
    rows = it.rows_for(context)
    return Traits(
        vocabulary=model.vocabulary,
        context=context,
        positions=max(rows, context),
        rows=rows,
        slots=it.slots,
        parameters=model.parameters,
        dtype=kind,
        numerics="fast",
        tokenizer_digest=read_tokenizer_digest(path),
        eos_ids=read_eos_ids(path),
        weight_bytes=model.bytes,
        kv_bytes=cells * cell,
        kv_tokens=cells if cells < it.slots * rows else 0,
        compiles_sizes=False,
        computed_by="llama.cpp",
    )
