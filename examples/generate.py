"""Text from a running cluster. usage: python examples/generate.py [HOST:PORT]"""

import sys

import outrider

with outrider.Client(*sys.argv[1:2]) as client:
    result = client.generate("def add(a, b):\n", max_tokens=48, temperature=0.6, seed=7)
    print(result.text)

    # The same seed gives the same text, with or without speculation. Only the speed changes.
    plain = client.generate("def add(a, b):\n", max_tokens=48, temperature=0.6, seed=7, speculation="off")
    for name, usage in (("speculative", result.usage), ("plain", plain.usage)):
        print(f"{name}: {usage.steps} steps, {usage.acceptance_length:.2f} tokens a step")
