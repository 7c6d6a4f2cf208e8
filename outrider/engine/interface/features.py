"""The hidden states of a pass that an engine returns beside its logits, for heads that draft from them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Features:
    """Which hidden states a pass returns of which rows.

    The input of the head, wanted of all rows, costs the last layer also over rows without wanted logits, as most of a
    prompt's. The outputs of earlier layers are computed in any case.
    """

    layers: tuple[int, ...] = ()  # layers whose outputs are joined, the first is 1; (): the normed input of the head
    all_rows: bool = False  # of all rows; else only of those whose logits are wanted

    @property
    def parts(self) -> int:
        """Width of the features, in widths of the residual stream."""
        return len(self.layers) or 1

    def check(self, layers: int) -> None:
        """Raise ConfigError when a model of `layers` layers does not have these features."""
        if missing := [layer for layer in self.layers if not 1 <= layer < layers]:
            raise ConfigError(
                f"heads: they want the output of layer {missing[0]}, and the target's layers below its last one are "
                f"1 to {layers - 1}; take heads that were made for this target"
            )
