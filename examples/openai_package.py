"""The official `openai` package against the gateway.

pip install openai && make serve GATEWAY_PORT=9000
python examples/openai_package.py
"""

import json
import os

from openai import BadRequestError, OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:9000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # a gateway with --api-keys wants one of those
)
MESSAGES = [{"role": "user", "content": "Name three colours."}]

# Streaming, with the usage at the end.
stream = client.chat.completions.create(
    model="ddtree",
    messages=MESSAGES,
    max_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"tree_budget": 16},  # what the API has no name for goes here
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print()
        print("accepted draft tokens:", chunk.usage.completion_tokens_details.accepted_prediction_tokens)
        print("rounds:", chunk.metrics["speculative_decoding"]["num_spec_steps"])

# An answer of a given form.
schema = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model="ddtree",
    messages=MESSAGES,
    max_tokens=64,
    response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
)
print("by schema:", json.loads(answer.choices[0].message.content))

# What is not served is refused by name.
try:
    client.chat.completions.create(
        model="ddtree",
        messages=MESSAGES,
        tools=[{"type": "function", "function": {"name": "now", "parameters": {}}}],
    )
except BadRequestError as error:
    print("refused:", error.param)
