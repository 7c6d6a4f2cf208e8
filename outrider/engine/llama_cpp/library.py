"""llama.cpp as `llama-cpp-python` has it: a model, a context with its memory, and batches of tokens."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.llama_cpp.sequences import BatchToken
from outrider.errors import CheckpointError, ConfigError

BATCH = 2048  # most tokens of one call
ALL_LAYERS = 1 << 20  # on the device
NO_ROOM = 1  # llama_decode's status where the memory is full
WARNING = 3  # of llama.cpp's log

log = logging.getLogger(__name__)


def library() -> Any:
    """Return llama.cpp's interface for C. Raises ConfigError where it is not installed."""
    try:
        from llama_cpp import llama_cpp  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, OSError, RuntimeError) as error:  # its library may be missing, or another machine's
        raise ConfigError(
            f"backend: llama.cpp is not to be had here ({error}); pip install 'outrider[llama-cpp]'"
        ) from None
    return llama_cpp


class LlamaModel:
    """A GGUF file's weights."""

    def __init__(self, path: Path, *, on_device: bool) -> None:
        """`on_device`: whether its layers are computed by what llama.cpp was built for. Raises CheckpointError and
        ConfigError.
        """
        self.library = library()
        _quiet(self.library)
        params = self.library.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if on_device else 0
        self.handle = self.library.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise CheckpointError(f"{path}: llama.cpp cannot load it; a newer one may know the family")
        vocabulary = self.library.llama_model_get_vocab(self.handle)
        self.vocabulary = int(self.library.llama_vocab_n_tokens(vocabulary))
        self.parameters = int(self.library.llama_model_n_params(self.handle))
        self.bytes = int(self.library.llama_model_size(self.handle))
        self.recurrent = bool(
            self.library.llama_model_is_recurrent(self.handle) or self.library.llama_model_is_hybrid(self.handle)
        )

    def close(self) -> None:
        """Free it."""
        self.library.llama_model_free(self.handle)


class LlamaContext:
    """The KV of a model's sequences, in one buffer, and passes over batches of tokens."""

    def __init__(
        self, model: LlamaModel, cells: int, sequences: int, threads: int, *, on_device: bool, precise: bool
    ) -> None:
        """`cells`: tokens whose KV it holds; `precise`: in float32. Raises ConfigError where memory is too small."""
        self._library, self._vocabulary = model.library, model.vocabulary
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = cells, BATCH, sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = params.swa_full = True  # so that sequences share cells, and can be cut anywhere
        if precise:
            params.type_k = params.type_v = self._library.GGML_TYPE_F32
        if not on_device:  # flash attention on processors takes two to three times as long
            params.flash_attn_type = self._library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._handle = self._library.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise ConfigError(f"slots: llama.cpp cannot keep the KV of {cells} tokens; give fewer, or a context")
        self._memory = self._library.llama_get_memory(self._handle)
        self._batch = self._library.llama_batch()
        self._arrays: dict[str, NDArray[Any]] = {
            "token": np.zeros(BATCH, np.int32),
            "pos": np.zeros(BATCH, np.int32),
            "n_seq_id": np.zeros(BATCH, np.int32),
            "seq_id": np.zeros(BATCH, np.uintp),
            "logits": np.zeros(BATCH, np.int8),
        }
        kinds = dict(self._library.llama_batch._fields_)
        for name, array in self._arrays.items():
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def remove(self, sequence: int, first: int) -> None:
        """See `SequenceMemory`."""
        self._library.llama_memory_seq_rm(self._memory, sequence, first, -1)

    def copy(self, source: int, target: int, end: int) -> None:
        """See `SequenceMemory`."""
        self._library.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def decode(self, tokens: Sequence[BatchToken], logits: NDArray[np.float32]) -> None:
        """Compute tokens, and write the logits that are wanted to their rows of `logits`."""
        for first in range(0, len(tokens), BATCH):
            self._decode(tokens[first : first + BATCH], logits)

    def _decode(self, tokens: Sequence[BatchToken], logits: NDArray[np.float32]) -> None:
        arrays, count = self._arrays, len(tokens)
        ids = np.array([sequence for token in tokens for sequence in token.sequences], np.int32)
        counts = np.array([len(token.sequences) for token in tokens])
        outputs = np.array([token.output for token in tokens])
        arrays["token"][:count] = [token.row.token for token in tokens]
        arrays["pos"][:count] = [token.row.position for token in tokens]
        arrays["n_seq_id"][:count] = counts
        arrays["seq_id"][:count] = ids.ctypes.data + ids.itemsize * (np.cumsum(counts) - counts)
        arrays["logits"][:count] = outputs >= 0
        self._batch.n_tokens = count
        if status := self._library.llama_decode(self._handle, self._batch):
            reason = "the memory of its KV is full" if status == NO_ROOM else f"status {status}"
            raise RuntimeError(f"llama.cpp cannot compute {count} tokens: {reason}")
        wanted = outputs[outputs >= 0]
        if not len(wanted):
            self._library.llama_synchronize(self._handle)
            return
        found = ctypes.cast(self._library.llama_get_logits(self._handle), ctypes.c_void_p)
        kind = ctypes.c_float * (len(wanted) * self._vocabulary)
        rows = np.ctypeslib.as_array(kind.from_address(found.value or 0)).reshape(len(wanted), self._vocabulary)
        logits[wanted] = rows

    def close(self) -> None:
        """Free it."""
        self._library.llama_free(self._handle)


_kept: list[Any] = []  # callbacks that llama.cpp has


def _quiet(library: Any) -> None:
    """Have what llama.cpp says in our log, where it debugs: it says much, and what matters it returns."""
    if not _kept:
        _kept.append(library.llama_log_callback(_say))
        library.llama_log_set(_kept[0], ctypes.c_void_p(0))
        library.llama_backend_init()


def _say(level: int, text: bytes, _: Any) -> None:
    if level >= WARNING and text.strip():
        log.debug("llama.cpp: %s", text.decode(errors="replace").rstrip())
