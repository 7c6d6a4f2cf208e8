"""Processes that die, freeze and lose each other under sessions that must not notice.

`python -m tests.chaos --scenario kill-router --seed 7` injects the same faults in the same order each time. The proxy
that makes links slow, frozen or broken is bench.faults.FaultProxy, which the benchmarks use, too.
"""
