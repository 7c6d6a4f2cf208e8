"""How sure the model was of each token. usage: python examples/logprobs.py [HOST:PORT]"""

import math
import sys

import outrider

with outrider.Client(*sys.argv[1:2]) as client:
    result = client.generate("def add(a, b):\n", max_tokens=12, temperature=0.0, logprobs=3, timeout=60)
    read = client.generate("def add(a, b):\n", max_tokens=1, prompt_logprobs=0, timeout=60).prompt_logprobs[1:]
    print(f"the prompt's {len(read)} tokens behind its first one: {sum(entry.logprob for entry in read):.2f}")
    for entry in result.logprobs:  # the raw model's, whatever the temperature
        likely = ", ".join(
            f"{text.decode(errors='replace')!r} {math.exp(logprob):.2f}"
            for text, (_, logprob) in zip(entry.top_texts, entry.top, strict=True)
        )
        print(f"{entry.text.decode(errors='replace')!r:12} {math.exp(entry.logprob):.2f}   of: {likely}")
