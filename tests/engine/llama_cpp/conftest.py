"""Tests of llama.cpp itself are collected where it is installed: `make test-llama-cpp`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("llama_cpp") else ["test_cluster.py", "test_engine.py"]
