"""A checkpoint like the reference drafter, but for its tokenizer: without the later merges, texts have more tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"


def make_other(folder: Path, *, merges: int = 1500) -> Path:
    """The model is as good as its last merges are dispensable."""
    shutil.copytree(MODELS / "drafter", folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:merges]
    path.unlink()
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder
