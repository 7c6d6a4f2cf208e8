"""Heads on the target: small networks that draft from its hidden states. They load without transformers.

The cost of drafting one level, in weights that are read, for the shape of Llama-3 8B (W = 4096, V = 128k, 8.0 G
weights in a pass of the target):

- the unembedding, V * W = 0.53 G, once a level;
- Medusa: besides, W * W = 17 M a head; it drafts all levels at once;
- an MLP speculator: besides, 2 * W * W = 34 M;
- EAGLE: besides, 2 * W * W and a layer, 0.25 G, and the KV of that layer, 1 / 32 of the target's; EAGLE-3: a little
  more.

So a level is cheap where the target has many layers, and the unembedding is most of the cost. A row takes two
operations for each weight: a few dozen rows cost as much as one, as in a pass of the target.
"""
