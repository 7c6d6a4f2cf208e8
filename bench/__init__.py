"""Benchmarks, and the fault injection that tests and benchmarks share."""
