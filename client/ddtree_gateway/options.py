"""A request of the API as prompts and options of the client; what is not served is refused. Sends nothing.

The defaults are the API's: temperature 1, and 16 tokens for a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddtree_client.types import GenerateOptions
from ddtree_gateway.errors import ApiError, unsupported
from ddtree_gateway.schema import ChatRequest, CompletionRequest, ResponseFormat
from ddtree_gateway.settings import Settings

_COMPLETION_TOKENS: Final = 16
_NO_TOOLS: Final = (
    "is not supported: the model's text is not parsed into calls; describe the tools in a message and "
    "ask for JSON with response_format"
)
# A parameter, the values that change nothing, and why others are refused.
_REFUSED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("tools", ([],), _NO_TOOLS),
    ("tool_choice", ("none", "auto"), _NO_TOOLS),
    ("functions", ([],), _NO_TOOLS),
    ("function_call", ("none", "auto"), _NO_TOOLS),
    ("modalities", (["text"],), "other than text is not supported"),
    ("audio", (), "is not supported: answers are text"),
    ("prediction", (), "is not supported: the drafter predicts; leave it out"),
    (
        "reasoning_effort",
        (),
        "is not supported; what the model's template offers is set by chat_template_kwargs",
    ),
    ("verbosity", (), "is not supported; ask for it in a message"),
    ("web_search_options", (), "is not supported: nothing is searched"),
    ("moderation", (), "is not supported: nothing is moderated"),
    ("prompt_cache_options", (), "is not supported; cache_salt keeps prompts apart"),
    ("service_tier", ("auto", "default"), "other than auto and default is not supported"),
    ("store", (False,), "is not supported: nothing is kept"),
    ("echo", (False,), "is not supported; put the prompt in front yourself"),
    ("suffix", ("",), "is not supported: the model continues and does not fill in"),
)
_PASSED: Final = (
    "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "tree_budget",
    "draft_mode", "cache_salt", "guided_regex", "guided_grammar", "guided_choice",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One prompt: exactly one of the three."""

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Order:
    """What is asked of the server, for each prompt with the same options."""

    model: str  # as the caller calls it
    prompts: tuple[Prompt, ...]
    options: GenerateOptions
    sequences: int  # of each prompt
    deadline_s: float | None  # as the caller set it; the server keeps it
    timeout_s: float  # after which nobody waits any more
    stream: bool
    include_usage: bool
    log_probs: int | None  # most probable tokens to show at each place; None: no log-probs at all


def chat_order(request: ChatRequest, settings: Settings) -> Order:
    """A chat as an order.

    Raises:
        ApiError: names the parameter that is not served.
    """
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    most = request.max_completion_tokens or request.max_tokens or settings.default_max_tokens
    log_probs = (request.top_logprobs or 0) if request.logprobs else None
    options = _options(request, most, log_probs)
    if request.response_format is not None and request.response_format.type != "text":
        options["guided_json"] = _schema(request.response_format)
    if request.chat_template_kwargs:
        options["chat_template_kwargs"] = request.chat_template_kwargs
    messages = [_message(index, message) for index, message in enumerate(request.messages)]
    return _order(request, (Prompt(messages=messages),), options, log_probs, settings)


def completion_order(request: CompletionRequest, settings: Settings) -> Order:
    """A completion as an order.

    Raises:
        ApiError: names the parameter that is not served.
    """
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "other than n is not supported")
    options = _options(request, request.max_tokens or _COMPLETION_TOKENS, request.logprobs)
    return _order(request, _prompts(request.prompt), options, request.logprobs, settings)


def _prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (Prompt(text=prompt),)
    if isinstance(prompt[0], int):
        return (Prompt(token_ids=prompt),)
    if isinstance(prompt[0], str):
        return tuple(Prompt(text=each) for each in prompt)
    return tuple(Prompt(token_ids=each) for each in prompt)


def _order(
    request: ChatRequest | CompletionRequest,
    prompts: tuple[Prompt, ...],
    options: GenerateOptions,
    log_probs: int | None,
    settings: Settings,
) -> Order:
    if request.model not in settings.names:
        raise ApiError(
            404,
            f"there is no model {request.model!r} here; there is {', '.join(settings.names)}",
            param="model",
            code="model_not_found",
        )
    for name, neutral, reason in _REFUSED:
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise unsupported(name, reason)
    return Order(
        model=request.model,
        prompts=prompts,
        options=options,
        sequences=request.n or 1,
        deadline_s=request.deadline,
        timeout_s=settings.request_timeout_s,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        log_probs=log_probs,
    )


def _options(
    request: ChatRequest | CompletionRequest, max_tokens: int, log_probs: int | None
) -> GenerateOptions:
    options: dict[str, Any] = {name: getattr(request, name) for name in _PASSED}
    options["temperature"] = 1.0 if request.temperature is None else request.temperature
    options["max_tokens"] = max_tokens
    options["num_return_sequences"] = request.n
    if request.seed is not None:
        options["seed"] = request.seed % 2**64  # the API's seeds have a sign
    if request.logit_bias:
        options["logit_bias"] = _logit_bias(request.logit_bias)
    if log_probs is not None:
        options["return_log_probs"] = True
        options["num_top_log_probs"] = log_probs
    given: GenerateOptions = {name: value for name, value in options.items() if value is not None}  # type: ignore[assignment]
    return given


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit()):
            message = f"logit_bias must have token ids as keys, got {token[:40]!r}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return {int(token): value for token, value in bias.items()}


def _schema(wanted: ResponseFormat) -> Mapping[str, object]:
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format of type json_schema needs json_schema.schema",
            param="response_format",
            code="invalid_value",
        )
    return wanted.json_schema.schema_


def _message(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as templates know it."""
    for key in ("role", "content"):
        if key not in message:
            param = f"messages[{index}]"
            raise ApiError(400, f"{param} must have {key!r}", param=param, code="invalid_value")
    # The API's newer name of the role; no model's template knows it.
    return {**message, "role": "system"} if message["role"] == "developer" else message
