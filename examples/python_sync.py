"""A conversation with the Python client, which speaks gRPC to Triton directly.

pip install ./client && make serve
python examples/python_sync.py
"""

import os

from ddtree_client import Client

URL = os.environ.get("DDTREE_URL", "localhost:8001")

with Client(URL, timeout_s=60) as client:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    with client.stream(messages=messages, max_tokens=48) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()

    stats = stream.result.stats
    print(
        f"{stats.output_tokens} tokens in {stats.rounds} rounds, {stats.tokens_per_second or 0:.0f} tokens/s"
    )

    # The same answer without drafts: drafting changes the speed and nothing else.
    plain = client.generate(messages=messages, max_tokens=48, draft_mode="off")
    print("the same without drafts:", plain.text == stream.result.text)
