"""A target that all tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.family import make_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("family") / "target")
