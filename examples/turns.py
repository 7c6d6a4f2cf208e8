"""A conversation of several turns in one session. usage: python examples/turns.py [HOST:PORT]"""

import sys

import outrider

with outrider.Client(*sys.argv[1:2]) as client:
    session = client.create_session().session_id
    history = ""
    for prompt in ("class Stack:\n", "\n\nclass Queue:\n", "\n\ndef main():\n"):
        result = client.generate(prompt, session=session, max_tokens=32, temperature=0.6, seed=3, timeout=60)
        history += prompt + result.text
        # The cluster keeps what it computed for the turns before: only what is new has to be read.
        print(f"turn {result.generation}: {result.usage.prompt_tokens} tokens, {result.cached_tokens} of them at hand")
    print(history)

    # A prompt that is all of the history, and differs from it, leaves the session as it is and forks a new one off.
    edited = history.replace("Stack", "Heap", 1)
    fork = client.generate(edited, session=session, whole_history=True, max_tokens=16, seed=3, timeout=60)
    print(f"\nforked: {fork.session_id} from {fork.forked_from}")

    for ended in (session, fork.session_id):
        client.close_session(ended)
