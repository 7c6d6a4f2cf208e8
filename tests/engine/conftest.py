"""Engines and references that several files share; each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.native import NativeEngine
from tests.engine.checkpoints import MODELS, Reference, make_checkpoint

SLOTS = 8


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeEngine, Reference]:
    folder = make_checkpoint(tmp_path_factory.mktemp("small"))
    return NativeEngine.load(folder, dtype="float32", slots=SLOTS, threads=1), Reference.load(folder)


@pytest.fixture(scope="session")
def target() -> tuple[NativeEngine, Reference]:
    folder: Path = MODELS / "target"
    return NativeEngine.load(folder, dtype="float32", slots=SLOTS, threads=1), Reference.load(folder)


@pytest.fixture(params=["small", "target"])
def pair(request: pytest.FixtureRequest) -> tuple[NativeEngine, Reference]:
    """An engine and its reference: a random checkpoint with odd sizes, and the reference target."""
    chosen: tuple[NativeEngine, Reference] = request.getfixturevalue(request.param)
    return chosen
