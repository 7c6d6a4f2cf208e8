"""The config.json of a speculator: its kind and its sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from outrider.engine.checkpoints.checkpoint import ModelConfig, read_json
from outrider.engine.interface.features import Features
from outrider.errors import CheckpointError

Kind = Literal["medusa", "mlp", "eagle", "eagle-3"]
KINDS: tuple[str, ...] = get_args(Kind)
KEY = "outrider_speculator"  # key of the kind in config.json


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsConfig:
    """The kind and the sizes of heads; sizes that the kind does not use are 0."""

    kind: Kind
    width: int  # of the target's residual stream
    vocabulary: int  # the target's
    depth: int  # maximum of levels that the heads draft
    own_head: bool = False  # whether the heads have an unembedding; else they use the target's
    inner: int = 0  # width of an MLP speculator's state; units of EAGLE's feed-forward
    heads: int = 0  # of EAGLE's attention
    kv_heads: int = 0
    head_dim: int = 0
    theta: float = 10000.0  # of EAGLE's RoPE
    eps: float = 1e-6  # of EAGLE's norms
    layers: tuple[int, ...] = ()  # layers of the target whose outputs EAGLE-3 joins; the first layer is 1

    @property
    def features(self) -> Features:
        """The hidden states of the target that the heads need."""
        return Features(self.layers, all_rows=self.eagle)

    @property
    def eagle(self) -> bool:
        """Whether the heads are a layer over features of all rows."""
        return self.kind in ("eagle", "eagle-3")

    def write(self, folder: Path) -> None:
        """Write config.json into an existing folder."""
        raw = {KEY if name == "kind" else name: value for name, value in asdict(self).items()}
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def make_heads_config(
    kind: Kind, target: ModelConfig, *, depth: int, own_head: bool = False, inner: int = 0
) -> HeadsConfig:
    """Return the sizes of heads for a target.

    EAGLE's layer has the sizes of a layer of the target, an MLP speculator's state the width of its residual stream.
    """
    eagle = kind in ("eagle", "eagle-3")
    return HeadsConfig(
        kind=kind,
        width=target.width,
        vocabulary=target.vocabulary,
        depth=depth,
        own_head=own_head,
        inner=inner or (target.ffn if eagle else target.width if kind == "mlp" else 0),
        heads=target.heads if eagle else 0,
        kv_heads=target.kv_heads if eagle else 0,
        head_dim=target.head_dim if eagle else 0,
        theta=target.rope.theta,
        eps=target.eps,
        layers=low_middle_high(target.layers) if kind == "eagle-3" else (),
    )


def low_middle_high(layers: int) -> tuple[int, int, int]:
    """Return the layers whose outputs EAGLE-3 joins, never the last one.

    Where the target has enough layers, these are the ones that the code of arXiv 2503.01840 joins.
    """
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, max(1, layers // 2), max(1, layers - 1))


def read_heads_config(folder: Path) -> HeadsConfig:
    """Return the config of a speculator's folder. Raises CheckpointError with file, field and what is allowed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of heads that were trained for the target")
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get(KEY) not in KINDS:
        raise CheckpointError(
            f"{path}: {KEY} is {raw.get(KEY)!r:.80}, must be one of {', '.join(KINDS)}: are these heads?"
        )
    values = {"kind": raw[KEY]}
    for field in fields(HeadsConfig):
        if field.name == "kind" or field.name not in raw:
            continue
        values[field.name] = _checked(path, field.name, raw[field.name])
    for name in ("width", "vocabulary", "depth", *_needed(raw[KEY])):
        if not values.get(name):
            raise CheckpointError(f"{path}: {name} is {raw.get(name)!r:.80}, must be there and not 0 or empty")
    shape = HeadsConfig(**values)
    if shape.kind == "mlp" and not shape.own_head and shape.inner != shape.width:
        raise CheckpointError(
            f"{path}: inner is {shape.inner}, must be width ({shape.width}) without a head of its own"
        )
    if shape.heads % (shape.kv_heads or 1) or shape.head_dim % 2:
        raise CheckpointError(f"{path}: heads must be a multiple of kv_heads, and head_dim even")
    return shape


def _needed(kind: str) -> tuple[str, ...]:
    """Return the sizes that a kind uses, besides those of all kinds."""
    attention = ("inner", "heads", "kv_heads", "head_dim")
    return {"medusa": (), "mlp": ("inner",), "eagle": attention, "eagle-3": (*attention, "layers")}[kind]


def _checked(path: Path, name: str, value: object) -> object:
    """Return a field's value. Raises CheckpointError where its type or range is wrong."""
    if name == "own_head":
        fine, allowed = isinstance(value, bool), "true or false"
    elif name in ("theta", "eps"):
        fine, allowed = (
            isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
            "a positive number",
        )
    elif name == "layers":
        fine = isinstance(value, list) and all(isinstance(it, int) and it > 0 for it in value)
        allowed, value = "a list of layers, the first is 1", tuple(value) if isinstance(value, list) else value
    else:
        fine, allowed = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a whole number"
    if not fine:
        raise CheckpointError(f"{path}: {name} is {value!r:.80}, must be {allowed}")
    return value
