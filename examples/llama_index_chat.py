"""LlamaIndex through the gateway.

pip install llama-index-llms-openai-like && make serve GATEWAY_PORT=9000
python examples/llama_index_chat.py
"""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model="ddtree",
    api_base=os.environ.get("OPENAI_BASE_URL", "http://localhost:9000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    is_chat_model=True,
    context_window=512,
    temperature=0,
    max_tokens=32,
)
messages = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="Name a colour."),
]

print("chat:", repr(model.chat(messages).message.content))
print("stream:", repr("".join(chunk.delta or "" for chunk in model.stream_chat(messages))))
print("complete:", repr(model.complete("The sky is").text))
