"""LangChain through the gateway.

pip install langchain-openai && make serve GATEWAY_PORT=9000
python examples/langchain_chat.py
"""

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model="ddtree",
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:9000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    temperature=0,
    max_tokens=32,
    stream_usage=True,
    extra_body={"draft_mode": "tree"},
)
chain = ChatPromptTemplate([("system", "Be brief."), ("user", "Name a {thing}.")]) | model

answer = chain.invoke({"thing": "colour"})
print("invoke:", repr(answer.content))
print("usage:", answer.usage_metadata["output_tokens"])
print("stream:", repr("".join(chunk.content for chunk in chain.stream({"thing": "colour"}))))

# A schema becomes a grammar. The other methods of LangChain need tool calls, which are not served.
schema = {
    "title": "Colour",
    "type": "object",
    "properties": {"name": {"enum": ["red", "green", "blue"]}},
    "required": ["name"],
    "additionalProperties": False,
}
structured = model.with_structured_output(schema, method="json_schema")
print("structured:", structured.invoke("Name a colour."))
