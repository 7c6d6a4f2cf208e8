"""Chooses and loads the engine for a checkpoint: a native one where it knows the family, else llama.cpp for a GGUF file
where it is installed, else transformers' modules.

`ENGINES` lists all kinds of engines, and what each of them runs.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.config import KvType
from outrider.engine.checkpoints.checkpoint import (
    UNPADDED,
    Outline,
    family_of,
    has_blocks,
    read_config,
    read_json,
    read_outline,
)
from outrider.engine.checkpoints.gguf.header import kept_header
from outrider.engine.cpu import missing
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Dtype, Engine, Numerics
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.group import ALONE, Group, SingleRank
from outrider.engine.tensor_parallel.socket_group import SocketGroup
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import Backend, is_gguf

ChosenBackend = Literal["native", "transformers", "llama.cpp"]

# Models of up to this many bytes are first probed in float32, because rounding to bfloat16 hides errors.
PRECISE = 4 << 30

log = logging.getLogger(__name__)


def chosen_backend(folder: Path, backend: Backend, device: str = "cpu") -> ChosenBackend:
    """Return the backend, with "auto" resolved for a checkpoint. Raises CheckpointError."""
    if backend != "auto":
        return backend
    read_outline(folder)  # raises for what is no model
    family = family_of(folder)
    if family is not None and (family.like_llama or (device == "cpu" and not missing())):
        return "native"
    return "llama.cpp" if is_gguf(folder) and find_spec("llama_cpp") else "transformers"


def is_compiled(folder: Path, backend: Backend, device: str) -> bool:
    """Return whether the compiled kernels run a model, or a rank's part, on this machine. Raises CheckpointError."""
    return device == "cpu" and not missing() and chosen_backend(folder, backend, device) == "native"


def has_two_engines(file: Path) -> bool:
    """Return whether both the compiled kernels and llama.cpp can run a model here. Raises CheckpointError."""
    return is_gguf(file) and find_spec("llama_cpp") is not None and is_compiled(file, "auto", "cpu")


def connect_ranks(
    folder: Path,
    backend: Backend,
    device: str,
    rank: int,
    of: int,
    rendezvous: str,
    *,
    host: str,
    timeout_s: float = 15.0,
) -> Group:
    """Connect this rank to the others that share a model, and return the kind of group that the engine needs.

    Wait for all ranks at `rendezvous`, an address of rank 0's host; see `SocketGroup`. Raises RankLost;
    CheckpointError; ConfigError where packages or the device are missing.
    """
    if is_compiled(folder, backend, device):
        return SocketGroup(rank, of, rendezvous, host=host, timeout_s=timeout_s)
    with requires_torch("a model that several ranks share, without the compiled kernels,"):
        from outrider.engine.gpu.devices import check_device
        from outrider.engine.tensor_parallel.process_group import CudaRanks, TorchRanks
    address = rendezvous.partition("#")[0]
    if device == "cpu":
        return TorchRanks(rank, of, address, host=host, timeout_s=timeout_s)
    return CudaRanks(rank, of, address, device=check_device(device), host=host, timeout_s=timeout_s)


def outline(folder: Path, backend: Backend = "auto") -> Outline:
    """Return the sizes of a checkpoint without loading it. Raises CheckpointError."""
    if chosen_backend(folder, backend) != "native":
        return read_outline(folder)
    config = read_config(folder)
    return Outline(config.model_type, config.vocabulary, config.context)


def load_engine(
    path: Path,
    *,
    backend: Backend = "auto",
    dtype: Dtype | Literal["auto"],
    kv_dtype: KvType = "auto",
    device: str = "cpu",
    layers: int | None = None,
    skip: Collection[int] = (),
    numerics: Numerics = "fast",
    slots: int,
    rows: int | None = None,
    threads: int | None = None,
    group: Group = ALONE,
    features: Features | None = None,
    progress: Callable[[float], None] | None = None,
    kv_memory: int | None = None,
    adapters: int = 0,
    heads: Path | None = None,
) -> Engine:
    """Load a checkpoint folder, or a rank's part of it.

    `dtype`: type of the weights; others are converted, for int8 and int4 quantized, while they are read. "stored": each
    stays in its file's, for the compiled kernels; "auto": that for quantized checkpoints where the kernels are, else
    bfloat16.
    `kv_dtype`: type of keys and values; "auto": float32 where the weights' is, else bfloat16.
    `layers`: run the first ones alone, then the final norm and the head (early exit). `skip`: run all layers but these.
    Layers that are left out are not read, and do not count in `parameters`. `numerics`: "invariant" requires that a
    token's logits have the same bits in every pass; the compiled kernels guarantee that in any case.
    `slots`: number of sessions. `rows`: cache rows of each; None: the checkpoint's context and 256 of scratch.
    `threads`: of operations on a CPU, in the complete process; None: one for each processor. `group`: the
    ranks that share a model. `features`: that passes return beside logits. `progress` is called with the fraction done,
    0 to 1. `kv_memory`, `adapters`: see `EngineSettings`; the compiled kernels need no preparation for adapters.
    `heads`: a folder of EAGLE heads that draft on the engine's device, not for a CPU.

    Raises CheckpointError for a checkpoint that is missing, corrupt or not supported, with the file and what to do;
    ConfigError where this machine, its packages or the backend do not support a setting, for layers that the checkpoint
    does not have, and for ranks that cannot share it.
    """
    with kept_header(path):
        chosen = "llama.cpp" if (backend, device) == ("auto", "gpu") else chosen_backend(path, backend, device)
        if device == "gpu" and chosen != "llama.cpp":
            raise ConfigError(f"device: gpu is for llama.cpp, and backend is {backend}; use cuda")
        if dtype == "auto":
            compiled = device == "cpu" and chosen == "native" and not _why_on_torch(group)
            dtype = "stored" if chosen == "llama.cpp" or (compiled and has_blocks(path)) else "bfloat16"
        given = {name: value for name, value in locals().items() if name in EngineSettings.__dataclass_fields__}
        settings = EngineSettings(**given)
        kind = next(it for it in ENGINES if it.backend == chosen and it.runs(settings))
        if dtype == "float8" and kind.load is not _load_on_device:
            raise ConfigError("dtype: float8 is for the native backend with device cuda; use int8")
        if kv_dtype != "auto" and kind.load is not _load_compiled:
            raise ConfigError(f"kv_dtype: {kv_dtype} is served by the compiled engine alone; leave it out")
        return kind.load(path, settings)


def _why_on_torch(group: Group) -> str:
    """Return why the native backend runs a model on a CPU with torch; "": the compiled engine runs it."""
    if isinstance(group, SocketGroup | SingleRank):
        return missing()
    return "its ranks are connected by torch.distributed"


def _load_compiled(path: Path, it: EngineSettings) -> Engine:
    engine = CpuEngine.load(path, it)
    log.debug("%s is computed by %s", path, engine.computed_by)
    return engine


def _load_on_torch(path: Path, it: EngineSettings) -> Engine:
    """Load the device's engine for a CPU, where the compiled kernels do not run. The host chooses the tokens."""
    reason = _why_on_torch(it.group)
    if it.numerics == "invariant":
        raise ConfigError(f"numerics: invariant is for the compiled kernels alone, and {reason}; use fast")
    if it.dtype in ("int8", "int4"):
        raise ConfigError(f"dtype: {it.dtype} on a CPU is for the compiled kernels alone, and {reason}; use bfloat16")
    with requires_torch(f"without the compiled kernels ({reason}) a model"):
        import torch

        from outrider.engine.gpu import DeviceEngine
    if it.threads is not None:
        torch.set_num_threads(it.threads)
    engine = DeviceEngine.load(path, it)
    engine.samples_tokens = engine.restricts_tokens = False  # these gain where a device is apart
    engine.grows_trees = engine.begins_next_pass = False
    engine.computed_by = f"torch, not by the compiled kernels: {reason}"
    log.log(logging.WARNING if missing() else logging.DEBUG, "%s is computed by %s", path, engine.computed_by)
    return engine


def _load_on_device(path: Path, it: EngineSettings) -> Engine:
    with requires_torch(f"device {it.device}"):
        from outrider.engine.gpu import DeviceEagleDrafts, DeviceEngine
    engine = DeviceEngine.load(path, it)
    if it.heads is not None:
        DeviceEagleDrafts(engine)
    if engine.kv_tokens:
        log.info(
            "%s: memory holds the KV of %d tokens: %.1f of %d texts of %d tokens at once; where it is full, sessions "
            "wait for one another",
            path,
            engine.kv_tokens,
            engine.kv_tokens / engine.context,
            it.slots,
            engine.context,
        )
    began = time.monotonic()
    engine.record()
    log.info("%s: recorded its passes in %.1f s", path, time.monotonic() - began)
    return engine


def _load_transformers(path: Path, it: EngineSettings) -> Engine:
    _refuse_what_is_native(it)
    if it.kv_memory is not None:
        raise ConfigError("kv_memory: the model runs through transformers, which keeps to no bound; leave it out")
    if it.device != "cpu":
        raise ConfigError(f"device: {it.device} is for the native backend alone; use cpu")
    if not is_gguf(path) and UNPADDED in read_json(path / "config.json"):
        raise CheckpointError(
            f"{path}: is padded with ids that the model must never choose; only the native backend ensures that"
        )
    family = read_outline(path).model_type
    with requires_torch(f"backend: {family}"):
        import torch

        from outrider.engine.transformers.quiet import quiet
    if it.threads is not None:
        torch.set_num_threads(it.threads)
    with quiet():
        try:
            from outrider.engine.transformers.capability_probe import find_serving_method
            from outrider.engine.transformers.pretrained import Pretrained
        except ImportError as error:
            raise ConfigError(
                f"backend: {family} runs through transformers, which is not to be had here ({error}); "
                "pip install 'outrider[transformers]'"
            ) from None
        shard, method = it.group.shard, None
        try:
            if it.dtype != "float32" and _bytes(path) <= PRECISE:
                method = find_serving_method(Pretrained.load(path, "float32", shard))
                gc.collect()  # modules form reference cycles: only this frees them before the next load
            pretrained = Pretrained.load(path, it.dtype, shard)
            method = find_serving_method(pretrained, after=method)
        except CheckpointError as error:
            if method is not None:  # the model can be served in float32
                raise ConfigError(
                    f"dtype: {path} does not run in {it.dtype}: {error}; use float32 or bfloat16"
                ) from None
            raise CheckpointError(f"{path}: {error}") from None
        engine = method.build(pretrained, it)
    if it.progress is not None:
        it.progress(1.0)
    return engine


def _load_llama_cpp(path: Path, it: EngineSettings) -> Engine:
    _refuse_what_is_native(it)
    if not is_gguf(path):
        raise ConfigError(f"backend: llama.cpp reads .gguf files, and {path} is none; use auto")
    if it.dtype != "stored":
        raise ConfigError(f"dtype: llama.cpp computes with the types of the file, not {it.dtype}; leave it out")
    if it.group.shard.of > 1:
        raise ConfigError("tensor_parallel: llama.cpp runs in one process; leave it out")
    from outrider.engine.llama_cpp.engine import LlamaCppEngine

    return LlamaCppEngine.load(path, it)


def _refuse_what_is_native(it: EngineSettings) -> None:
    """Raise ConfigError for settings that only the native backend has."""
    if it.features is not None:
        raise ConfigError(
            "heads: only the native backend gives the hidden states that they draft from; leave heads and features out"
        )
    if it.layers is not None or it.skip:
        raise ConfigError("layers, skip: only the native backend leaves layers out; give neither")
    if it.numerics != "fast":
        raise ConfigError(f"numerics: {it.numerics} is for the native backend alone; use fast")


class EngineKind(NamedTuple):
    """A kind of engine."""

    backend: ChosenBackend  # under which the configuration has it, see `outrider.hub`
    runs: Callable[[EngineSettings], bool]  # whether it is for these settings, where no kind before it is
    load: Callable[[Path, EngineSettings], Engine]  # raises as `load_engine`


ENGINES = (
    EngineKind("native", lambda it: it.device != "cpu", _load_on_device),
    EngineKind("native", lambda it: not _why_on_torch(it.group), _load_compiled),
    EngineKind("native", lambda it: True, _load_on_torch),
    EngineKind("transformers", lambda it: True, _load_transformers),
    EngineKind("llama.cpp", lambda it: True, _load_llama_cpp),
)


@contextmanager
def requires_torch(what: str) -> Iterator[None]:
    """Guard imports of modules that need torch. Raises ConfigError that names `what` needs it and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ConfigError(f"{what} needs PyTorch, which is not installed; pip install 'outrider[torch]'") from None


def _bytes(checkpoint: Path) -> int:
    if is_gguf(checkpoint):
        return 4 * checkpoint.stat().st_size  # dequantized
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
