"""What is installed is pinned: every dependency by constraints.txt, and the build's by pyproject.toml."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(len(it.specifier) == 1 and str(it.specifier).startswith("==") for it in found)
    return {canonicalize_name(it.name): str(it.specifier).removeprefix("==") for it in found}


def needed() -> set[str]:
    """The packages that all extras need here, with what those need."""
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [Requirement(it) for some in (PROJECT["project"]["dependencies"], *extras.values()) for it in some]
    found: set[tuple[str, str]] = set()  # names, with an extra or without
    while asked:
        it = asked.pop()
        for extra in {"", *it.extras}:
            key = canonicalize_name(it.name), extra
            if key in found or key[0] == "outrider" or (it.marker and not it.marker.evaluate({"extra": ""})):
                continue
            try:
                own = [Requirement(text) for text in distribution(it.name).requires or ()]
            except PackageNotFoundError:  # of another platform
                continue
            found.add(key)
            for inner in own:
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    inner.marker = None
                    asked.append(inner)
    return {name for name, _ in found}


def test_every_dependency_is_pinned() -> None:
    unpinned = needed() - pins().keys() - {"pip"}  # pip installs the others
    # Each version of PyTorch names one version of its packages for CUDA.
    assert {name for name in unpinned if not name.startswith(("nvidia-", "cuda-"))} == set()


def test_the_build_has_the_version_that_was_tested() -> None:  # bites: it holds two files of the repository
    for it in map(Requirement, PROJECT["build-system"]["requires"]):
        assert str(it.specifier) == f"=={pins()[canonicalize_name(it.name)]}"
