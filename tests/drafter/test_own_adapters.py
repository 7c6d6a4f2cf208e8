"""A drafter's own adapters: whatever goes wrong with one, its sessions are drafted for without it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import cast

import pytest

from drafter_svc.own_adapters import OwnAdapters
from outrider.core.session.contract import Adapter
from outrider.engine.interface.engine import Engine
from outrider.errors import CheckpointError


class Failing:
    """An engine that loads no adapter."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.calls = 0

    def load_adapter(self, folder: Path) -> tuple[object, None]:
        self.calls += 1
        raise self.failure


@pytest.mark.parametrize("failure", [CheckpointError("broken"), MemoryError("no more"), RuntimeError("a bug")])
def test_an_adapter_that_cannot_be_loaded_is_not_loading_for_ever(
    failure: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sql").mkdir()
    engine, adapter = Failing(failure), Adapter("sql", "a" * 32)
    own = OwnAdapters(tmp_path, most=1)
    for wanted in (adapter, Adapter("sql", "b" * 32)):  # the second of these finds a place
        loaded = threading.Event()
        with caplog.at_level(logging.WARNING):
            assert own.known(wanted, cast(Engine, engine), loaded.set) is None
            assert loaded.wait(10)
        assert own.known(wanted, cast(Engine, engine), loaded.set) is None
    assert engine.calls == 2
    assert f"sessions with adapter sql are drafted for without it: {failure}" in caplog.text
