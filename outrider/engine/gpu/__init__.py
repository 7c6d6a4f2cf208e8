"""The engine for accelerators: passes are recorded once as graphs, over buffers that never move."""

from outrider.engine.gpu.eagle.eagle_drafts import DeviceEagleDrafts
from outrider.engine.gpu.engine import DeviceEngine

__all__ = ["DeviceEagleDrafts", "DeviceEngine"]
