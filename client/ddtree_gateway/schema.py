"""The bodies of requests, as the API's reference and this service's extensions describe them.

Unknown names are refused by name, and so are values of the wrong type; nothing is converted. What a parameter
does is in `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Strings = Annotated[list[str], Field(max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted; there is none.")


class JsonSchema(_Body):
    """The schema of `response_format`."""

    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted; a schema always binds.")


class ResponseFormat(_Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class _Common(_Body):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="1 when absent.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | Strings | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Count | None = None
    user: str | None = Field(None, description="Accepted; nothing is kept.")
    # Ours: `extra_body` of the official client.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    bad_words: Strings | None = None
    tree_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    draft_mode: Literal["tree", "chain", "off"] | None = None
    cache_salt: str | None = None
    deadline: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds from arrival.")
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None


class ChatRequest(_Common):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted and not read: nothing here depends on them.
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # Refused unless they ask for what happens anyway; see `options`.
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    service_tier: str | None = None
    store: bool | None = None


class CompletionRequest(_Common):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=64)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=64)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
