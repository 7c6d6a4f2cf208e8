"""The tensors of a GGUF file under the names that checkpoints of Hugging Face have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.families import BY_ARCHITECTURE
from outrider.engine.checkpoints.families.family import EXPERTS, PARTS
from outrider.engine.checkpoints.files import Content
from outrider.engine.checkpoints.gguf.config import KeptRows, head_dim, kept_embedding
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.stored_tensors import StoredTensor, TensorSource

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TURNED = ("attn_q", "attn_k")  # converters reorder their rows for architecture llama
THREE = 3  # dimensions of a tensor of all experts
# Tensors that files have with a dimension less, and the shapes that they have here.
_FLATTENED: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "ffn_gate_inp_shexp": lambda shape: (1, shape[-1]),
    "ssm_conv1d": lambda shape: (shape[0], 1, *shape[1:]),
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.([\w.]+)", re.ASCII)
_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,8})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)


class RepeatedRow(NamedTuple):
    """A matrix most of whose rows are the same one, which its file has once, behind all others."""

    stored: StoredTensor
    kept: KeptRows
    order: None = None

    @property
    def file(self) -> Content:
        """The file of the rows."""
        return self.stored.file

    @property
    def dtype(self) -> str:
        """As the format names it, in upper case."""
        return self.stored.dtype

    @property
    def kind(self) -> str:
        """The name of its type in lower case."""
        return self.stored.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """With all rows."""
        return self.kept.of, *self.stored.shape[1:]

    @property
    def bytes(self) -> int:
        """Those in the file."""
        return self.stored.bytes

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of rows [first, last). Raises CheckpointError."""
        ids, wanted = self.kept.ids, np.arange(first, last)
        rows = np.searchsorted(ids, wanted)
        rows[~np.isin(wanted, ids)] = len(ids)
        return self.stored.read(0, len(ids) + 1).reshape(len(ids) + 1, -1)[rows].reshape(-1)


def gguf_tensors(file: GgufFile) -> dict[str, TensorSource]:
    """Return the tensors of a file; those that models of its family do not have keep their names.

    llama.cpp turns neighbours by RoPE for some families, so its converter puts the rows of a pair, which are half a
    head apart in a checkpoint, beside one another.
    """
    architecture = file.metadata.get("general.architecture")
    family = BY_ARCHITECTURE.get(architecture) if isinstance(architecture, str) else None
    pairs = head_dim(file) // 2 if family is not None and family.neighbours else 0
    parts = PARTS if family is None else family.parts
    found = dict[str, TensorSource]()
    for name, it in file.tensors.items():
        if family is not None and (match := _LAYER.fullmatch(name)) and (here := family.whole.get(match[2])):
            whole = StoredTensor(it.file, it.kind.upper(), it.shape, it.start, it.stop)
            found[f"model.layers.{match[1]}.{here}"] = whole
            continue
        match = _NAME.fullmatch(name)
        turned = pairs if match and match["part"] in _TURNED and not it.shape[0] % (2 * pairs or 1) else 0
        stored = StoredTensor(it.file, it.kind.upper(), it.shape, it.start, it.stop, turned)
        if match and match["part"] in EXPERTS and len(it.shape) == THREE:
            found |= _experts(match, stored)
            continue
        if match and match["part"] in _FLATTENED and len(it.shape) < THREE:
            stored = stored._replace(shape=_FLATTENED[match["part"]](it.shape))
        kept = kept_embedding(file) if name == "token_embd.weight" else None
        found[_name(match, parts) or name if match else name] = stored if kept is None else RepeatedRow(stored, kept)
    return found


def _experts(match: re.Match[str], stored: StoredTensor) -> dict[str, TensorSource]:
    """Return the matrices of a layer's experts, which a file has behind one another in one tensor."""
    count, *shape = stored.shape
    each = stored.bytes // count
    return {
        f"model.layers.{match['layer']}.mlp.experts.{number}.{EXPERTS[match['part']]}.{match['kind']}": StoredTensor(
            stored.file,
            stored.dtype,
            tuple(shape),
            stored.start + number * each,
            stored.start + (number + 1) * each,
            0,
        )
        for number in range(count)
    }


def gguf_name(name: str) -> str:
    """Return the name in a file of a tensor that models of the Llama family have."""
    stem, _, kind = name.rpartition(".")
    for part, found in _ENDS.items():
        if stem == found:
            return f"{part}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{next(part for part, found in PARTS.items() if found == rest)}.{kind}"


def _name(match: re.Match[str], parts: Mapping[str, str]) -> str | None:
    """Return a tensor's name in a checkpoint; None if models of its family have none like it."""
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_ENDS[part]}.{kind}" if part in _ENDS else None
    return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None
