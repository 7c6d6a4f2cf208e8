"""OpenAI's own client, through `outrider gateway`. usage: python examples/openai_client.py [URL]"""

import os
import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OUTRIDER_API_KEY", "unused")) as client:
    name = client.models.list().data[0].id
    stream = client.completions.create(
        model=name,
        prompt="def add(a, b):\n",
        max_tokens=48,
        temperature=0.6,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"outrider": {"speculation": "goodput"}},  # what OpenAI has no field for
    )
    for piece in stream:
        print("".join(choice.text for choice in piece.choices), end="", flush=True)
        if piece.usage and (details := piece.usage.completion_tokens_details):
            print(f"\n{piece.usage.completion_tokens} tokens, {details.accepted_prediction_tokens} of them drafted")
