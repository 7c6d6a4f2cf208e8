"""The engine for accelerators: passes are recorded once as graphs, over buffers that never move."""

from outrider.engine.device.eagle_drafts import DeviceEagleDrafts
from outrider.engine.device.engine import DeviceEngine

__all__ = ["DeviceEagleDrafts", "DeviceEngine"]
