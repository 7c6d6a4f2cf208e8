"""The version of the protocol between a cluster's parts, and what a text depends on beside its contract."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 1  # raised by each change of messages, or of how tokens are chosen, that an older part cannot follow
SPOKEN = frozenset({PROTOCOL})  # the versions of workers that a router uses


@dataclass(frozen=True, slots=True)
class Origin:
    """What chose a generation's first token. Its text goes on only where all of it is equal."""

    protocol: int  # 0: a version that did not announce any
    weights: str  # digest of the target's checkpoint; "": not known
    dtype: str  # types of the verifier's weights and KV, for quantized ones are another target; "": not known

    def __str__(self) -> str:
        kind = f" in {self.dtype}" if self.dtype else ""
        return f"protocol {self.protocol or 'unknown'} and weights {self.weights[:16] or 'unknown'}{kind}"

    def dump(self) -> str:
        """Encode it as a field of a session's record."""
        return f"{self.protocol} {self.weights} {self.dtype}"

    @classmethod
    def load(cls, text: str) -> Origin | None:
        """Decode what `dump` encoded; "" is None. Raises ValueError for anything else."""
        if not text:
            return None
        protocol, weights, dtype = text.split(" ")
        return cls(int(protocol), weights, dtype)


UNKNOWN_ORIGIN = Origin(0, "", "")
