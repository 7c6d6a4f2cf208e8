"""Tests of llama.cpp are collected where it is installed, and its converter: `make test-llama-cpp`."""

from __future__ import annotations

from importlib.util import find_spec

from tests.engine.llama_cpp.converter import CONVERTER

collect_ignore = [] if find_spec("llama_cpp") else ["test_cluster.py", "test_describe.py", "test_engine.py"]
if collect_ignore or not CONVERTER.exists():
    collect_ignore.append("test_converter.py")
