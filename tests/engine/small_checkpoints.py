"""Small random checkpoints of varied shapes, and `transformers` as the slow reference."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from outrider.engine.checkpoints.model_config import DRAFT_IDS
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.torch_layers.int4 import GROUP

MODELS = Path(__file__).parents[2] / "models"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 99,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
# What sets each shape apart from BASE.
SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "grouped": (LlamaConfig, {}),
    "one-kv-head-llama3": (LlamaConfig, {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "untied-wide-heads": (
        LlamaConfig,
        {"num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False, "vocab_size": 50},
    ),
    "biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "narrow-heads": (LlamaConfig, {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 6}),
    "mistral": (MistralConfig, {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
}


def make_checkpoint(folder: Path, shape: str = "grouped", ffn: int | None = None, **saving: Any) -> Path:
    """A random float32 checkpoint; the logits' deviation is about one."""
    kind, changes = SHAPES[shape]
    sizes = {} if ffn is None else {"intermediate_size": ffn}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(kind(**{**BASE, **changes, **sizes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases too: those that are one or zero hide mistakes.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder, **saving)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def keep_layers(source: Path, destination: Path, kept: Sequence[int]) -> Path:
    """A checkpoint that has only some of another's layers, renumbered."""
    shutil.copytree(source, destination)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            tensors[name] = tensor
        elif int(match[1]) in kept:
            tensors[f"model.layers.{kept.index(int(match[1]))}.{match[2]}"] = tensor
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("layer_types", None)
    raw["num_hidden_layers"] = len(kept)
    (destination / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return destination


def keep_ids(source: Path, destination: Path, ids: Sequence[int]) -> Path:
    """The same checkpoint with a head of these ids alone."""
    shutil.copytree(source, destination)
    tensors = load_file(source / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = head[list(ids)].clone()
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    own = {DRAFT_IDS: [*ids], "tie_word_embeddings": False}
    (destination / "config.json").write_text(json.dumps(raw | own), encoding="utf-8")
    return destination


def pad_vocabulary(source: Path, destination: Path, rows: int, *, loudness: float) -> Path:
    """The same checkpoint with more ids than its tokenizer has. The logit of a further id is that of an earlier one,
    times `loudness`: above 1, the model prefers them."""
    shutil.copytree(source, destination)
    tensors = load_file(source / "model.safetensors")
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        table = tensors[name]
        again = table[torch.arange(rows - len(table)) % len(table)]
        tensors[name] = torch.cat([table, loudness * again])
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (destination / "config.json").write_text(json.dumps(raw | {"vocab_size": rows}), encoding="utf-8")
    return destination


class RoundedLinear(nn.Module):
    """A linear that rounds its weight and its inputs as engines do, and with bfloat16 and int4 also its results."""

    def __init__(self, linear: nn.Linear, dtype: str) -> None:
        super().__init__()
        weight = linear.weight.detach()
        rounded = {"int8": rounded_to_int8, "int4": rounded_to_int4}.get(dtype, lambda it: it)(weight)
        self._in_int8 = dtype == "int8"
        self._dtype = torch.bfloat16 if dtype in ("bfloat16", "int4") else torch.float32
        self._weight = rounded.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        x = rounded_to_int8(x) if self._in_int8 else x.to(self._dtype).to(self._weight.dtype)
        y = linear(x, self._weight).to(self._dtype).float()
        return y if self._bias is None else y + self._bias


def int8_steps(rows: Tensor) -> Tensor:
    """The step of int8 of each row: [..., 1]."""
    return rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127


def rounded_to_int8(rows: Tensor) -> Tensor:
    """The rows with 127 steps on both sides of zero."""
    steps = int8_steps(rows)
    return (rows / steps).round() * steps


def int4_steps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The step and the offset of each group of a weight, as stored: both [outputs, groups, 1]."""
    low, high = weight.float().unflatten(1, (-1, GROUP)).aminmax(dim=2, keepdim=True)
    span = (high - low) / 15
    return span.bfloat16().float(), (low + 8 * span).bfloat16().float()


def rounded_to_int4(weight: Tensor) -> Tensor:
    """A weight, [outputs, inputs], with sixteen steps for each group of inputs."""
    steps, offsets = int4_steps(weight)
    codes = ((weight.unflatten(1, (-1, GROUP)) - offsets) / steps.where(steps > 0, 1.0)).round().clamp(-8, 7)
    return (codes * steps + offsets).flatten(1)


@dataclass
class Reference:
    """`transformers` in float32, or in the type given."""

    model: Any
    slack: float = 4.0  # of `contract.assert_alike`

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32, attention: str | None = "sdpa") -> Reference:
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval())

    @classmethod
    def rounded(cls, folder: Path, dtype: str) -> Reference:
        """`transformers` in float32, with linears of the type, or quantized ones, between its other operations."""
        reference = cls.load(folder)
        for name, module in [*reference.model.named_modules()]:
            if isinstance(module, nn.Linear):
                head = {"bfloat16": "float32", "int4": "int8"}.get(dtype, dtype)
                owner, _, own = name.rpartition(".")
                rounded = RoundedLinear(module, head if name == "lm_head" else dtype)
                setattr(reference.model.get_submodule(owner), own, rounded)
        return reference

    def logits(self, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits of a whole text, computed in one pass: [tokens, vocabulary]."""
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].double().numpy()


def assert_same(ours: NDArray[np.floating], reference: NDArray[np.floating]) -> None:
    """Within 1e-5 for logits whose standard deviation is one or less, and in proportion above.

    Float32 cannot do better: on the reference target (deviation 2.4, largest logit 12) the logits of transformers
    itself are up to 2.1e-5 off those that it computes in float64.
    """
    assert ours.shape == reference.shape
    assert ours.size
    assert np.isfinite(ours).all()
    difference = np.abs(ours - reference).max()
    assert difference <= 1e-5 * max(1.0, float(reference.std())), difference


def adapted(segment: Segment, adapter: object) -> Segment:
    """The segment with an adapter; None: the model as it is."""
    return replace(segment, adapter=adapter)


def prompt(slot: int, tokens: NDArray[np.int64], prefix: int = 0, wanted: int | None = None) -> Segment:
    """A causal chain behind `prefix` rows."""
    return Segment(slot, prefix, tokens, np.arange(prefix, prefix + len(tokens)), wanted=wanted)


def random_tokens(engine: Engine, random: np.random.Generator, count: int) -> NDArray[np.int64]:
    return random.integers(0, engine.vocabulary, count)


@dataclass
class Tree:
    """A random token tree. Parents come before children; -1 is the root, which is committed."""

    parents: list[int]
    tokens: NDArray[np.int64]

    @classmethod
    def random(cls, engine: Engine, random: np.random.Generator, nodes: int) -> Tree:
        return cls([int(random.integers(-1, node)) for node in range(nodes)], random_tokens(engine, random, nodes))

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to the node."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def depths(self) -> NDArray[np.int64]:
        return np.array([len(self.path(node)) for node in range(len(self.parents))])

    def mask(self) -> NDArray[np.bool_]:
        """[nodes, nodes]: every node sees its path."""
        mask = np.zeros((len(self.parents), len(self.parents)), np.bool_)
        for node in range(len(self.parents)):
            mask[node, self.path(node)] = True
        return mask

    def segment(self, slot: int, prefix: int) -> Segment:
        """The whole tree behind `prefix` rows, the last of which is the root."""
        return Segment(slot, prefix, self.tokens, prefix - 1 + self.depths(), self.mask())


def assert_invariant(engine: Engine, nodes: int) -> None:
    """A tree's last path has the bits that its tokens have one by one. The engine has two slots, and rows for both."""
    random = np.random.default_rng(4)
    history, tree = random_tokens(engine, random, 40), Tree.random(engine, random, nodes)
    engine.forward([prompt(0, history, wanted=0)])
    logits = engine.forward([tree.segment(0, len(history))])
    path = tree.path(nodes - 1)
    text = np.concatenate([history, tree.tokens[path]])
    alone = [engine.forward([prompt(1, text[at : at + 1], at)])[0] for at in range(len(text))]
    assert np.array_equal(logits[path], alone[len(history) :])
