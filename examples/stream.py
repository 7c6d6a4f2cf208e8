"""Text as it comes, and how to stop early. usage: python examples/stream.py [HOST:PORT]"""

import sys

import outrider

with outrider.Client(*sys.argv[1:2]) as client:
    try:
        with client.stream("class Stack:\n", max_tokens=64, temperature=0.8, seed=1, timeout=60) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(f"\nended by {stream.result.finish_reason}")

        for chunk in client.stream("import os\n", max_tokens=512):
            if chunk.text_offset > 80:
                break  # leaving the loop ends the generation on the server, too
    except outrider.errors.Overloaded as error:
        print(f"busy; come back in {error.retry_after} s")
