"""Which of a pass's hidden states an engine gives beside its logits: what heads on the target draft from."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Features:
    """What is wanted of each row.

    Every row's cost the last layer over rows whose logits nobody wants, a prompt's; the outputs of earlier layers are
    there in any case.
    """

    layers: tuple[int, ...] = ()  # whose outputs, side by side, the first is 1; none: what goes into the head, normed
    every: bool = False  # of every row; else of those whose logits are wanted

    @property
    def parts(self) -> int:
        """How many times as wide as the residual stream they are."""
        return len(self.layers) or 1

    @property
    def whole(self) -> bool:
        """Whether the last layer is computed for rows whose logits nobody wants."""
        return self.every and not self.layers

    def check(self, layers: int) -> None:
        """Raises ConfigError when a model of so many layers does not have them."""
        if missing := [layer for layer in self.layers if not 1 <= layer < layers]:
            raise ConfigError(
                f"heads: they want the output of layer {missing[0]}, and the target's layers below its last one are "
                f"1 to {layers - 1}; take heads that were made for this target"
            )
