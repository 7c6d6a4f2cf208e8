"""Low-rank adapters (LoRA): a small change of a model's weights, which rows of a pass may have or not."""
