"""Core dumps of servers: none are written, because the memory of a server holds keys and prompts."""

from __future__ import annotations

import sys


def forbid_core_dumps() -> None:
    """Have the kernel write no core dump of this process, and of the processes that it starts from now on.

    The limit is one byte: with 0, Linux would still hand dumps to a program, where `core_pattern` names one.
    """
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 1 if most == resource.RLIM_INFINITY else min(1, most)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
