"""Compiles the sources of the engine for CPUs side by side. All else is in pyproject.toml."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildSideBySide(build_ext):
    """As the usual command, which compiles one source after the other."""

    def build_extension(self, ext: Extension) -> None:
        compile_all = self.compiler.compile

        def compile_side_by_side(sources: list[str], *args: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                found = pool.map(lambda source: compile_all([source], *args, **options), sources)
                return [path for paths in found for path in paths]

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)


setup(cmdclass={"build_ext": BuildSideBySide})
