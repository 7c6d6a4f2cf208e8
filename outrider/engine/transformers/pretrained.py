"""Loads a causal model of `transformers` from a checkpoint folder, in a precision, or a rank's part of it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from outrider.engine.checkpoints.checkpoint import read_eos_ids, read_json, read_outline, read_tokenizer_digest
from outrider.engine.checkpoints.model_config import DRAFT_IDS
from outrider.engine.interface.engine import Dtype
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.transformers.quiet import silenced
from outrider.engine.transformers.reduced_head import with_own_head
from outrider.engine.transformers.weight_only import quantize
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import is_gguf

# For every model that transformers makes. A checkpoint may name kernels of the hub, which transformers would download
# and run unless an argument, here its own choice, takes their place.
NO_HUB_KERNELS: dict[str, Any] = {"attn_implementation": None, "experts_implementation": None}
# For every checkpoint that it reads: none of its code runs, no pickled weights are read, and no file stays mapped into
# memory: a change would change the weights of a model that serves, and a truncation end the process by SIGBUS.
SAFE_LOADING: dict[str, Any] = {
    "local_files_only": True,
    "trust_remote_code": False,
    "use_safetensors": True,
    "disable_mmap": True,
    **NO_HUB_KERNELS,
}
WINDOWS = ("sliding_window", "attention_chunk_size")  # fields of a configuration: tokens back that some layers see


@dataclass(slots=True)
class Pretrained:
    """A model and the sizes from its checkpoint."""

    model: Any
    dtype: Dtype
    vocabulary: int
    context: int
    eos_ids: tuple[int, ...]
    tokenizer_digest: bytes
    parameters: int
    weight_bytes: int  # bytes that one rank reads in a pass
    inputs: frozenset[str]  # parameters of its forward
    attention: str  # the implementation that transformers chooses for it

    @classmethod
    def load(cls, path: Path, dtype: Dtype, shard: Shard) -> Pretrained:
        """Load a model, or a rank's part of it. Run no code of the checkpoint and read no pickled weights.

        Raises CheckpointError for a checkpoint that transformers cannot load, ConfigError for a `dtype` that this
        machine does not support and for ranks that cannot share the model.
        """
        logging.disable_progress_bar()
        if shard.of > 1 and dtype in ("int8", "int4"):
            raise ConfigError(
                f"dtype: {dtype} is not for several ranks where transformers shares a model; use bfloat16"
            )
        outline, digest = read_outline(path), read_tokenizer_digest(path)
        reduced = not is_gguf(path) and DRAFT_IDS in read_json(path / "config.json")
        if reduced and shard.of > 1:
            raise ConfigError("tensor_parallel: a drafter whose head has some of the ids is one process's")
        stored = {"float32": torch.float32}.get(dtype, torch.bfloat16)  # int4's kernel needs bfloat16 inputs
        try:
            with _ranks(shard) as sharing, silenced("transformers.modeling_utils") if reduced else nullcontext():
                model = from_pretrained(path, dtype=stored, ignore_mismatched_sizes=reduced, **sharing).eval()
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"transformers cannot load it: {_first_line(error)}") from None
        if reduced:
            model = with_own_head(model, path)
        parameters = model.num_parameters()
        if dtype in ("int8", "int4"):
            quantize(model, dtype)
        return cls(
            model=model,
            dtype=dtype,
            vocabulary=outline.vocabulary,
            context=outline.context,
            eos_ids=read_eos_ids(path),
            tokenizer_digest=digest,
            parameters=parameters,
            weight_bytes=_weight_bytes(model),
            inputs=frozenset(inspect.signature(model.forward).parameters),
            attention=model.config.get_text_config()._attn_implementation,
        )

    def set_attention(self, attention: str) -> None:
        """Set the attention that transformers knows under that name, where the model supports several."""
        self.model.set_attn_implementation(attention)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the model's own logits of a text, from one pass without a cache: [tokens, vocabulary]."""
        options = {"use_cache": False} if "use_cache" in self.inputs else {}
        logits = self.model(input_ids=torch.tensor([list(tokens)]), **options).logits[0]
        return plain_tensor(logits).float()[:, : self.vocabulary]

    @contextmanager
    def limited_windows(self, length: int) -> Iterator[None]:
        """Limit the windows of layers with sliding windows or chunks to `length` tokens in the body."""
        config = self.model.config.get_text_config()
        before = {name: getattr(config, name) for name in WINDOWS if isinstance(getattr(config, name, None), int)}
        try:
            for name, window in before.items():
                setattr(config, name, min(window, length))
            yield
        finally:
            for name, window in before.items():
                setattr(config, name, window)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the complete tensor of one that may be distributed over ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def from_pretrained(checkpoint: Path, **options: Any) -> Any:
    """Return the model of a checkpoint, dequantized where it is in GGUF. Raises the errors of transformers."""
    if not is_gguf(checkpoint):
        return AutoModelForCausalLM.from_pretrained(checkpoint, **SAFE_LOADING, **options)
    from transformers import GgufConfig

    dequantized = GgufConfig(gguf_file=checkpoint.name, dequantize=True)
    with redirect_stderr(StringIO()):  # a progress bar that no setting of transformers switches off
        return AutoModelForCausalLM.from_pretrained(
            checkpoint.parent, gguf_file=checkpoint.name, quantization_config=dequantized, **SAFE_LOADING, **options
        )


@contextmanager
def _ranks(shard: Shard) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which transformers loads a rank's part; it reads rank numbers from the environment.

    Raises ConfigError for a sharing that the model's tensor-parallel plan does not allow.
    """
    if shard.of == 1:
        yield {}
        return
    numbers = {"RANK": shard.rank, "LOCAL_RANK": shard.rank, "WORLD_SIZE": shard.of}
    before = {name: os.environ.get(name) for name in numbers}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    try:
        yield {"distributed_config": DistributedConfig(tp_size=shard.of, tp_plan="auto")}
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"tensor_parallel: transformers cannot share this model among {shard.of} ranks: {_first_line(error)}"
        ) from None
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _weight_bytes(model: Any) -> int:
    """Return the bytes of all weights, without an embedding that is not also the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(weight) for weight in embedding.parameters()} if embedding is not None else set()
    heads = {id(weight) for weight in head.parameters()} if head is not None else set()
    return sum(_bytes(weight) for weight in model.parameters() if id(weight) not in tables - heads)


def _bytes(weight: Tensor) -> int:
    """Return the bytes of this rank's part of a weight."""
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    if hasattr(local, "__tensor_flatten__"):  # of torchao: several tensors
        names, _ = local.__tensor_flatten__()
        return sum(getattr(local, name).nbytes for name in names)
    return local.nbytes


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
