"""What speculation does, and how it is configured. usage: python examples/speculation.py [HOST:PORT]"""

import sys

import outrider

WAYS: dict[str, outrider.Options] = {
    "off": {"speculation": "off"},
    "as the router decides": {},
    "at most two tokens ahead": {"speculation": "fixed", "depth": 2},  # none while drafts do not pay
    "two tokens ahead, always": {"speculation": "rounds", "depth": 2},  # to compare with: each step waits for them
    "another rule": {"rule": "traversal-verification"},  # distributed as the target's, but a draw of its own
}

with outrider.Client(*sys.argv[1:2]) as client:
    texts = {}
    for way, options in WAYS.items():
        result = client.generate("class Stack:\n", max_tokens=48, temperature=0.6, seed=7, timeout=60, **options)
        texts[way] = result.text
        usage = result.usage
        print(f"{way:25} {usage.steps} steps, {usage.acceptance_length:.2f} tokens a step, {usage.verified} nodes")
    print(f"the same text: {texts['off'] == texts['as the router decides'] == texts['two tokens ahead, always']}")
