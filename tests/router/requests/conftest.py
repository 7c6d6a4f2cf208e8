"""Folders of checkpoints with chat templates, and models that are loaded from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.requests.served_models import ServedModel, load_model
from tests.router.rig import FOLDER

Folder = Callable[..., Path]
Opened = Callable[[Path], ServedModel]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Makes a folder with the reference tokenizer and a template."""

    def make(template: object = None, file: str | None = None, **config: object) -> Path:
        made = tmp_path / "model"
        made.mkdir(exist_ok=True)
        shutil.copy(FOLDER / "tokenizer.json", made)
        values = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
        given = {} if template is None else {"chat_template": template}
        (made / "tokenizer_config.json").write_text(json.dumps(values | given | config), encoding="utf-8")
        if file is not None:
            (made / "chat_template.jinja").write_text(file, encoding="utf-8")
        return made

    return make


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Loads models, and closes them."""
    models: list[ServedModel] = []

    def load(folder: Path) -> ServedModel:
        models.append(load_model("m", folder))
        return models[-1]

    yield load
    for model in models:
        model.close()
