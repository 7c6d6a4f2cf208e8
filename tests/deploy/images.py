"""The Dockerfile, as far as tests look into it."""

from __future__ import annotations

import re
from functools import cache

from tests.deploy.manifests import DEPLOY

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


@cache
def stages() -> dict[str, list[str]]:
    """Instructions of each stage, with their words as they stand, by its name; the first of each is its FROM."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            found[line.rpartition(" AS ")[2]] = [line]
        elif found:
            found[[*found][-1]].append(line)
    return found


def lineage(stage: str) -> list[str]:
    """A stage's instructions after those of what it is made from, as far as that is here."""
    first, *own = stages()[stage]
    base = first.split()[1]
    return [*(lineage(base) if base in stages() else []), *own]
