"""An answer that somebody else goes on with, and one that is cancelled. usage: python examples/resume.py [HOST:PORT]"""

import sys

import outrider

with outrider.Client(*sys.argv[1:2]) as client, outrider.Client(*sys.argv[1:2]) as another:
    # A stream resumes by itself when its call breaks. When its process dies, another one can go on with it: it needs
    # the session, and where the last chunk ended.
    stream = client.stream("class Stack:\n", max_tokens=64, temperature=0.8, seed=1, timeout=60)
    chunks = iter(stream)
    last = next(chunks)
    rest = another.resume(stream.session_id, next_position=last.next_position, text_offset=last.text_offset, timeout=60)
    print(last.text + "".join(chunk.text for chunk in rest))

    try:
        next(chunks)  # whoever resumes takes the generation over
    except (outrider.errors.Superseded, StopIteration) as error:
        print(f"the first reader: {type(error).__name__}")

    # Anybody may cancel who knows the session; what was said until then is the result.
    stream = client.stream("import os\n", max_tokens=512, ignore_eos=True, timeout=60)
    for _ in stream:
        another.cancel(stream.session_id)
    print(f"ended by {stream.result.finish_reason} after {len(stream.result.token_ids)} tokens")
