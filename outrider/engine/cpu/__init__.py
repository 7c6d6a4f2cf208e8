"""The compiled engine for CPUs: a pass is one call into `outrider._native`, whose sources are in `src`.

The engine is in `outrider.engine.cpu.engine`; `missing` returns why this machine cannot run it.
"""

from __future__ import annotations

import os

SWITCH = "OUTRIDER_ENGINE"  # "torch": have torch compute, also where the compiled one is installed


def missing() -> str:
    """Return why the compiled engine is not available; "": it is available."""
    if os.environ.get(SWITCH) == "torch":
        return f"{SWITCH}=torch is set"
    try:
        import outrider._native  # noqa: F401
    except ImportError as error:
        return f"it was not built when Outrider was installed, which needs a C++ compiler ({error})"
    return ""
