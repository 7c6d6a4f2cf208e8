"""What loads a model, by the names that the configuration and commands have for it. No heavy package is imported."""

from __future__ import annotations

from typing import Literal

Backend = Literal["auto", "native", "transformers"]  # see `ENGINES` in outrider.engine.loading
