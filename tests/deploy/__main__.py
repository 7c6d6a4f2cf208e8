"""`make manifests`: writes every overlay as it is rendered, and says what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tests.deploy.manifests import OVERLAYS, rendered
from tests.deploy.validation import problems


def main(folder: Path) -> int:
    """Returns the exit status: 1 when something is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    for overlay in OVERLAYS:
        manifests = rendered(overlay)
        (folder / f"{overlay}.yaml").write_text(yaml.safe_dump_all(manifests, sort_keys=False), encoding="utf-8")
        found = problems(manifests)
        wrong += found
        print(f"{overlay}: {len(manifests)} objects" + "".join(f"\n  {line}" for line in found))
    print(f"manifests: {len(wrong)} problems; they are in {folder}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
