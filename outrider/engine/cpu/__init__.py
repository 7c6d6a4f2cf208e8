"""The compiled engine for CPUs: a pass is one call into `outrider._native`, whose sources are in `src`.

`outrider.engine.cpu.engine` has the engine; `missing` is why it cannot be had here.
"""

from __future__ import annotations

import os

SWITCH = "OUTRIDER_ENGINE"  # "torch": the engine on torch serves, though the compiled one is there


def missing() -> str:
    """Why the compiled engine is not to be had; empty: it is."""
    if os.environ.get(SWITCH) == "torch":
        return f"{SWITCH}=torch is set"
    try:
        import outrider._native  # noqa: F401
    except ImportError as error:
        return f"it was not built when Outrider was installed, which needs a C++ compiler ({error})"
    return ""
