"""Engines and references that several files share; each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.settings import EngineSettings
from tests.engine.small_checkpoints import MODELS, Reference, make_checkpoint

SLOTS = 8


class OnTorch(DeviceEngine):
    """The device's engine on a CPU, which serves where there is no compiler."""


EngineClass = type[CpuEngine] | type[OnTorch]
Pair = tuple[CpuEngine | DeviceEngine, Reference]


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(CpuEngine, id="compiled"),
        pytest.param(OnTorch, id="torch", marks=pytest.mark.extended),  # without a compiler
    ],
)
def engine_class(request: pytest.FixtureRequest) -> EngineClass:
    """Both engines for CPUs."""
    chosen: EngineClass = request.param
    return chosen


@pytest.fixture(scope="session")
def small(engine_class: EngineClass, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = make_checkpoint(tmp_path_factory.mktemp("small"))
    return engine_class.load(folder, EngineSettings(dtype="float32", slots=SLOTS, threads=1)), Reference.load(folder)


@pytest.fixture(scope="session")
def target(engine_class: EngineClass) -> Pair:
    folder: Path = MODELS / "target"
    return engine_class.load(folder, EngineSettings(dtype="float32", slots=SLOTS, threads=1)), Reference.load(folder)


@pytest.fixture(params=["small", "target"])
def pair(request: pytest.FixtureRequest, engine_class: EngineClass) -> Pair:
    """An engine and its reference: a random checkpoint with odd sizes, and the reference target."""
    chosen: Pair = request.getfixturevalue(request.param)
    return chosen
