"""Several prompts at the same time, over one connection.

pip install ./client && make serve
python examples/python_async.py
"""

import asyncio
import os

from ddtree_client import AsyncClient

URL = os.environ.get("DDTREE_URL", "localhost:8001")
PROMPTS = ["The capital of France is", "Water boils at", "The opposite of cold is"]


async def main() -> None:
    """Ask everything at once, then break off one answer."""
    async with AsyncClient(URL, timeout_s=60) as client:
        answers = await asyncio.gather(*(client.generate(prompt, max_tokens=16) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt!r} -> {answer.text!r}")

        # Leaving the block cancels the request on the server.
        async with client.stream("Count: 1, 2, 3,", max_tokens=200) as stream:
            async for chunk in stream:
                print("first chunk:", repr(chunk.text))
                break


asyncio.run(main())
