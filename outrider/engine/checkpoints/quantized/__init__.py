"""Checkpoints of the hub whose weights are quantized: AWQ, GPTQ, compressed-tensors, FP8, MXFP4 and NVFP4."""
