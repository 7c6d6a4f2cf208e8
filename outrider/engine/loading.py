"""Which engine runs a checkpoint: the lean native one where it knows the family, else the model's own modules."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from outrider.engine.checkpoint import SAYABLE, SUPPORTED, Outline, read_config, read_json, read_outline
from outrider.engine.cpu import missing
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.engine import SCRATCH, Dtype, Engine, Numerics
from outrider.engine.features import Features
from outrider.engine.group import ALONE, Alone, Group, TensorGroup
from outrider.engine.socket_group import SocketGroup
from outrider.errors import CheckpointError, ConfigError

# Bytes of weights up to which a model is tried in float32 first, where a mistake shows that bfloat16's rounding hides.
PRECISE = 4 << 30

log = logging.getLogger(__name__)

Backend = Literal["auto", "native", "transformers"]


def chosen_backend(folder: Path, backend: Backend) -> Literal["native", "transformers"]:
    """What "auto" stands for. Raises CheckpointError."""
    if backend != "auto":
        return backend
    return "native" if read_outline(folder).model_type in SUPPORTED else "transformers"


def is_compiled(folder: Path, backend: Backend, device: str) -> bool:
    """Whether the compiled kernels compute a model, or a rank's part of it, on this machine. Raises CheckpointError."""
    return device == "cpu" and not missing() and chosen_backend(folder, backend) == "native"


def meet(
    folder: Path, backend: Backend, device: str, rank: int, of: int, meeting: str, *, host: str, timeout_s: float = 15.0
) -> Group:
    """The ranks that share a model, as its engine needs them, once all have come to the `meeting`, an address of rank
    0's host; see `SocketGroup`. Raises RankLost; CheckpointError; ConfigError where packages or the device are missing.
    """
    if is_compiled(folder, backend, device):
        return SocketGroup(rank, of, meeting, host=host, timeout_s=timeout_s)
    with needing_torch("a model that several ranks share, without the compiled kernels,"):
        from outrider.engine.device.engine import check_device
        from outrider.engine.process_group import CudaRanks, Ranks
    address = meeting.partition("#")[0]
    if device == "cpu":
        return Ranks(rank, of, address, host=host, timeout_s=timeout_s)
    return CudaRanks(rank, of, address, device=check_device(device), host=host, timeout_s=timeout_s)


def _why_on_torch(group: Group) -> str:
    """Why the native backend runs a model on a CPU through torch; empty: the compiled engine does."""
    return missing() if isinstance(group, SocketGroup | Alone) else "its ranks are connected by torch.distributed"


def _on_torch(group: Group) -> TensorGroup:
    assert isinstance(group, TensorGroup)  # `meet` gives no other kind
    return group


def outline(folder: Path, backend: Backend = "auto") -> Outline:
    """What a checkpoint says of itself to those that do not load it. Raises CheckpointError."""
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
) -> Engine:
    """Loads a checkpoint folder, or a rank's part of it, with the backend; the rest is as for `NativeEngine.load`.

    `numerics`: "invariant" demands that a token's logits are the same bits however it was computed, which those of the
    compiled kernels are in any case. `kv_memory`: see `CpuEngine.load`.

    Raises CheckpointError, and ConfigError where this machine, its packages or the backend lack what is asked for.
    """
    native = chosen_backend(path, backend) == "native"
    if features is not None and (not native or device != "cpu"):
        raise ConfigError(
            "heads: only the native backend on a CPU gives the hidden states that they draft from; leave heads and "
            "features out"
        )
    if kv_memory is not None and (why := _why_unbounded(native, device, group)):
        raise ConfigError(f"kv_memory: only the compiled kernels keep to a bound, and {why}; leave it out")
    if native:
        if device != "cpu":
            with needing_torch(f"device {device}"):
                from outrider.engine.device import DeviceEngine
            return DeviceEngine.load(
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
            )
        engine: Engine
        reason = _why_on_torch(group)
        if not reason and isinstance(group, SocketGroup | Alone):
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
            with needing_torch(f"without the compiled kernels ({reason}) a model"):
                from outrider.engine.native import NativeEngine
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
    if SAYABLE in read_json(path / "config.json"):
        raise CheckpointError(
            f"{path}: is padded with ids that must not be said, which the native backend alone keeps to"
        )
    if numerics != "fast":
        raise ConfigError(f"numerics: {numerics} is for the native backend alone; use fast")
    outline = read_outline(path)
    with needing_torch(f"backend: {outline.model_type}"):
        import torch

        from outrider.engine.quiet import quiet
    if threads is not None:
        torch.set_num_threads(threads)
    with quiet():
        try:
            from outrider.engine.pretrained import Pretrained
            from outrider.engine.trial import find_way
        except ImportError as error:
            raise ConfigError(
                f"backend: {outline.model_type} runs through transformers, which is not to be had here ({error}); "
                "pip install 'outrider[transformers]'"
            ) from None
        threads = torch.get_num_threads()
        way = None
        try:
            if dtype != "float32" and _bytes(path) <= PRECISE:
                way = find_way(Pretrained.load(path, "float32", group.shard), threads=threads)
                gc.collect()  # modules refer to one another: only this frees them before the next ones are there
            pretrained = Pretrained.load(path, dtype, group.shard)
            way = find_way(pretrained, threads=threads, after=way)
        except CheckpointError as error:
            if way is not None:  # it can be served in float32
                raise ConfigError(f"dtype: {path} does not run in {dtype}: {error}; use float32 or bfloat16") from None
            raise CheckpointError(f"{path}: {error}") from None
        engine = way.build(
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
    if not native:
        return "the model runs through transformers"
    return f"the device is {device}" if device != "cpu" else _why_on_torch(group)


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """For imports of what runs on torch. Raises ConfigError that says what needs it and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ConfigError(f"{what} needs PyTorch, which is not installed; pip install 'outrider[torch]'") from None


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
