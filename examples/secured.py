"""TLS and an API key. usage: python examples/secured.py HOST:PORT CA.pem KEYFILE

OUTRIDER_ROUTER, OUTRIDER_CA and OUTRIDER_API_KEY_FILE set these for any program, and so does a profile (docs/sdk.md).
"""

import sys
from pathlib import Path

import outrider

address, ca, key_file = sys.argv[1:4]

with outrider.Client(address, ca=ca, api_key=Path(key_file).read_text(encoding="utf-8").strip()) as client:
    for model in client.models(timeout=10):
        print(f"{model.name}: {model.context} tokens, {model.verifiers} verifiers, {model.drafters} drafters")

try:
    with outrider.Client(address, ca=ca, api_key="outrider_of_nobody") as client:
        client.models(timeout=10)
except outrider.errors.Unauthenticated as error:
    print(f"another key: {error}")
