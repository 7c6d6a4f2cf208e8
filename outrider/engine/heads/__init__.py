"""Heads on the target: small networks that draft from its hidden states. They load without transformers.

What a level costs beside a pass of the target, in weights that are read, for the shape of Llama-3 8B (W = 4096, V =
128k, 8.0 G weights in a pass): the unembedding, V * W = 0.53 G, once a level, and besides, for Medusa, W * W = 17 M a
head, all levels being one; for an MLP speculator 2 * W * W = 34 M; for EAGLE 2 * W * W and a layer, 0.25 G, and the KV
of that layer, 1 / 32 of the target's; for EAGLE-3 a little more. So a level is cheap where layers are many, and most
of it is the unembedding. A row takes two operations a weight: a few dozen cost what one costs, as in a pass.
"""
