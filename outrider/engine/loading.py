"""Chooses and loads the engine for a checkpoint: a native one where it knows the family, else transformers' modules."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from outrider.engine.checkpoints.checkpoint import SUPPORTED, UNPADDED, Outline, read_config, read_json, read_outline
from outrider.engine.cpu import missing
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import SCRATCH, Dtype, Engine, Numerics
from outrider.engine.interface.features import Features
from outrider.engine.tensor_parallel.group import ALONE, Group, SingleRank, TensorGroup
from outrider.engine.tensor_parallel.socket_group import SocketGroup
from outrider.errors import CheckpointError, ConfigError

# Models of up to this many bytes are first probed in float32, because rounding to bfloat16 hides errors.
PRECISE = 4 << 30

log = logging.getLogger(__name__)

Backend = Literal["auto", "native", "transformers"]


def chosen_backend(folder: Path, backend: Backend) -> Literal["native", "transformers"]:
    """Return the backend, with "auto" resolved for a checkpoint. Raises CheckpointError."""
    if backend != "auto":
        return backend
    return "native" if read_outline(folder).model_type in SUPPORTED else "transformers"


def is_compiled(folder: Path, backend: Backend, device: str) -> bool:
    """Return whether the compiled kernels run a model, or a rank's part, on this machine. Raises CheckpointError."""
    return device == "cpu" and not missing() and chosen_backend(folder, backend) == "native"


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


def _why_on_torch(group: Group) -> str:
    """Return why the native backend runs a model on a CPU with torch; "": the compiled engine runs it."""
    return missing() if isinstance(group, SocketGroup | SingleRank) else "its ranks are connected by torch.distributed"


def _on_torch(group: Group) -> TensorGroup:
    assert isinstance(group, TensorGroup)  # `connect_ranks` returns no other kind
    return group


def outline(folder: Path, backend: Backend = "auto") -> Outline:
    """Return the sizes of a checkpoint without loading it. Raises CheckpointError."""
    if chosen_backend(folder, backend) == "transformers":
        return read_outline(folder)
    config = read_config(folder)
    return Outline(config.model_type, config.vocabulary, config.context)


def load_engine(
    path: Path,
    *,
    backend: Backend = "auto",
    dtype: Dtype,
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
    """Load a checkpoint folder, or a rank's part of it; for the other parameters see `NativeEngine.load`.

    `numerics`: "invariant" requires that a token's logits have the same bits in every pass; the compiled kernels
    guarantee that in any case. `kv_memory`: see `CpuEngine.load`. `adapters`: see `DeviceEngine.load`; on a CPU they
    need no preparation. `heads`: a folder of EAGLE heads that draft on the engine's device, not for a CPU.

    Raises CheckpointError, and ConfigError where this machine, its packages or the backend do not support a setting.
    """
    native = chosen_backend(path, backend) == "native"
    if features is not None and not native:
        raise ConfigError(
            "heads: only the native backend gives the hidden states that they draft from; leave heads and features out"
        )
    if kv_memory is not None and (why := _why_unbounded(native, device, group)):
        raise ConfigError(f"kv_memory: {why}, which keeps to no bound; leave it out")
    if dtype == "float8" and (not native or device == "cpu"):
        raise ConfigError("dtype: float8 is for the native backend with device cuda; use int8")
    if native:
        if device != "cpu":
            with requires_torch(f"device {device}"):
                from outrider.engine.gpu import DeviceEagleDrafts, DeviceEngine
            device_engine = DeviceEngine.load(
                path,
                device=device,
                dtype=dtype,
                layers=layers,
                skip=skip,
                numerics=numerics,
                slots=slots,
                rows=rows,
                group=_on_torch(group),
                progress=progress,
                kv_memory=kv_memory,
                adapters=adapters,
                features=features,
                heads=heads,
            )
            if heads is not None:
                DeviceEagleDrafts(device_engine)
            if device_engine.kv_tokens:
                log.info(
                    "%s: memory holds the KV of %d tokens: %.1f of %d texts of %d tokens at once; where it is full, "
                    "sessions wait for one another",
                    path,
                    device_engine.kv_tokens,
                    device_engine.kv_tokens / device_engine.context,
                    slots,
                    device_engine.context,
                )
            began = time.monotonic()
            device_engine.record()
            log.info("%s: recorded its passes in %.1f s", path, time.monotonic() - began)
            return device_engine
        engine: Engine
        reason = _why_on_torch(group)
        if not reason and isinstance(group, SocketGroup | SingleRank):
            engine = CpuEngine.load(
                path,
                dtype=dtype,
                layers=layers,
                skip=skip,
                slots=slots,
                rows=rows,
                threads=threads,
                group=group,
                features=features,
                progress=progress,
                kv_memory=kv_memory,
            )
        elif numerics == "invariant":
            raise ConfigError(f"numerics: invariant is for the compiled kernels alone, and {reason}; use fast")
        else:
            with requires_torch(f"without the compiled kernels ({reason}) a model"):
                from outrider.engine.torch_layers.engine import NativeEngine
            engine = NativeEngine.load(
                path,
                dtype=dtype,
                layers=layers,
                skip=skip,
                slots=slots,
                rows=rows,
                threads=threads,
                group=_on_torch(group),
                features=features,
                progress=progress,
            )
            engine.computed_by = f"torch, not by the compiled kernels: {reason}"
        log.log(logging.WARNING if missing() else logging.DEBUG, "%s is computed by %s", path, engine.computed_by)
        return engine
    if layers is not None or skip:
        raise ConfigError("layers, skip: only the native backend leaves layers out; give neither")
    if device != "cpu":
        raise ConfigError(f"device: {device} is for the native backend alone; use cpu")
    if UNPADDED in read_json(path / "config.json"):
        raise CheckpointError(
            f"{path}: is padded with ids that the model must never choose; only the native backend ensures that"
        )
    if numerics != "fast":
        raise ConfigError(f"numerics: {numerics} is for the native backend alone; use fast")
    outline = read_outline(path)
    with requires_torch(f"backend: {outline.model_type}"):
        import torch

        from outrider.engine.transformers.quiet import quiet
    if threads is not None:
        torch.set_num_threads(threads)
    with quiet():
        try:
            from outrider.engine.transformers.capability_probe import find_serving_method
            from outrider.engine.transformers.pretrained import Pretrained
        except ImportError as error:
            raise ConfigError(
                f"backend: {outline.model_type} runs through transformers, which is not to be had here ({error}); "
                "pip install 'outrider[transformers]'"
            ) from None
        threads = torch.get_num_threads()
        method = None
        try:
            if dtype != "float32" and _bytes(path) <= PRECISE:
                method = find_serving_method(Pretrained.load(path, "float32", group.shard), threads=threads)
                gc.collect()  # modules form reference cycles: only this frees them before the next load
            pretrained = Pretrained.load(path, dtype, group.shard)
            method = find_serving_method(pretrained, threads=threads, after=method)
        except CheckpointError as error:
            if method is not None:  # the model can be served in float32
                raise ConfigError(f"dtype: {path} does not run in {dtype}: {error}; use float32 or bfloat16") from None
            raise CheckpointError(f"{path}: {error}") from None
        engine = method.build(
            pretrained,
            slots=slots,
            rows=pretrained.context + SCRATCH if rows is None else rows,
            threads=threads,
            group=_on_torch(group),
        )
    if progress is not None:
        progress(1.0)
    return engine


def _why_unbounded(native: bool, device: str, group: Group) -> str:
    """Return why an engine has no bound on its KV memory; "": it has one."""
    if not native:
        return "the model runs through transformers"
    reason = "" if device != "cpu" else _why_on_torch(group)
    return reason and f"the model runs on torch ({reason})"


@contextmanager
def requires_torch(what: str) -> Iterator[None]:
    """Guard imports of modules that need torch. Raises ConfigError that names `what` needs it and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ConfigError(f"{what} needs PyTorch, which is not installed; pip install 'outrider[torch]'") from None


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
