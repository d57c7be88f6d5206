"""Tensor names and types of the model ``ddtree``: from options to a request, from a response to values.

The only module that knows tensors. It does not know connections, time, or when an answer is complete. Names
are those of TensorRT-LLM where it has one (see the server's ``config.pbtxt``). Rules about values (ranges,
context length) are the server's; here only what cannot be put into a tensor is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from ddtree_client.errors import InvalidRequestError
from ddtree_client.types import GenerateOptions, Message, TokenLogProbs, TracedRound

FINAL_PARAMETER = "triton_final_response"


@dataclass(frozen=True)
class InputSpec:
    """An input tensor: its name and Triton data type. Scalars have shape [rows, 1], lists [rows, n]."""

    name: str
    datatype: str


TEXT = InputSpec("text_input", "BYTES")
MESSAGES = InputSpec("messages", "BYTES")
TOKEN_IDS = InputSpec("input_ids", "INT32")

OPTION_INPUTS: Mapping[str, InputSpec] = {
    "max_tokens": InputSpec("max_tokens", "INT32"),
    "stop": InputSpec("stop_words", "BYTES"),
    "bad_words": InputSpec("bad_words", "BYTES"),
    "draft_mode": InputSpec("draft_mode", "BYTES"),
    "tree_budget": InputSpec("tree_budget", "INT32"),
    "temperature": InputSpec("temperature", "FP32"),
    "top_p": InputSpec("top_p", "FP32"),
    "top_k": InputSpec("top_k", "INT32"),
    "min_p": InputSpec("min_p", "FP32"),
    "seed": InputSpec("seed", "UINT64"),
    "repetition_penalty": InputSpec("repetition_penalty", "FP32"),
    "presence_penalty": InputSpec("presence_penalty", "FP32"),
    "frequency_penalty": InputSpec("frequency_penalty", "FP32"),
    "logit_bias": InputSpec("logit_bias", "BYTES"),
    "min_tokens": InputSpec("min_tokens", "INT32"),
    "stop_token_ids": InputSpec("stop_token_ids", "INT32"),
    "return_log_probs": InputSpec("return_log_probs", "BOOL"),
    "num_top_log_probs": InputSpec("num_top_log_probs", "INT32"),
    "num_return_sequences": InputSpec("num_return_sequences", "INT32"),
    "chat_template_kwargs": InputSpec("chat_template_kwargs", "BYTES"),
    "deadline_ms": InputSpec("deadline_ms", "INT32"),
    "cache_salt": InputSpec("cache_salt", "BYTES"),
    "guided_json": InputSpec("guided_json", "BYTES"),
    "guided_regex": InputSpec("guided_regex", "BYTES"),
    "guided_grammar": InputSpec("guided_grammar", "BYTES"),
    "guided_choice": InputSpec("guided_choice", "BYTES"),
    "ignore_eos": InputSpec("ignore_eos", "BOOL"),
}

# What is read of a response. The server sends a trace, and the bytes of tokens, only to who lists them.
_READ_OUTPUTS = (
    "batch_index", "sequence_index", "text_output", "output_ids", "finish_reason", "num_output_tokens",
    "num_input_tokens", "num_rounds", "total_accepted_draft_tokens", "total_draft_tokens",
    "output_log_probs", "drawn_log_probs", "top_log_prob_ids", "top_log_probs", "output_token_bytes",
    "top_log_prob_bytes", "warning",
)  # fmt: skip

# Always on: chunks as they are made, without the prompt, with what the statistics need.
_FIXED_INPUTS = tuple(
    InputSpec(name, "BOOL")
    for name in ("stream", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
)

_LIST_OPTIONS = frozenset({"stop", "bad_words", "stop_token_ids", "guided_choice"})
_DTYPES: Mapping[str, Any] = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
_INTEGER_RANGES = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}


@dataclass(frozen=True)
class Prompts:
    """The prompt of every row as the server takes it: text, messages as JSON, or token ids (one row)."""

    spec: InputSpec
    rows: tuple[str, ...] | tuple[tuple[int, ...]]


@dataclass(frozen=True)
class ResponseValues:
    """What one response says about one row. Counters are None where the server did not send them."""

    row: int
    sequence: int  # of the row
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    output_tokens: int | None  # of this chunk
    input_tokens: int | None
    rounds: int | None  # from here on: of the whole row, on its last chunk
    accepted_draft_tokens: int | None
    draft_tokens: int | None
    log_probs: tuple[TokenLogProbs, ...] = ()
    trace: tuple[TracedRound, ...] = ()
    warning: str = ""


def one_prompt(
    prompt: str | None, messages: Sequence[Message] | None, input_ids: Sequence[int] | None
) -> Prompts:
    """The single row of a request. Raises InvalidRequestError unless exactly one of the three is given."""
    given = {"prompt": prompt, "messages": messages, "input_ids": input_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidRequestError(
            f"give exactly one of prompt, messages and input_ids, got {' and '.join(names) or 'none of them'}"
        )
    if prompt is not None:
        return many_prompts([prompt], None)
    if messages is not None:
        return many_prompts(None, [messages])
    assert input_ids is not None, "one of the three is given"
    return Prompts(TOKEN_IDS, (tuple(input_ids),))


def many_prompts(prompts: Sequence[str] | None, messages: Sequence[Sequence[Message]] | None) -> Prompts:
    """Rows of one request, all texts or all conversations. Raises InvalidRequestError for anything else."""
    if (prompts is None) == (messages is None):
        raise InvalidRequestError("give exactly one of prompts and messages")
    if isinstance(prompts, str):
        raise InvalidRequestError(
            "prompts must be a list of strings, got one string; use generate() for one prompt"
        )
    rows = prompts if prompts is not None else messages
    if not rows:
        raise InvalidRequestError("a request needs at least one row, got an empty list")
    if prompts is not None:
        return Prompts(TEXT, tuple(prompts))
    assert messages is not None, "one of the two is given"
    return Prompts(MESSAGES, tuple(_messages_json(conversation) for conversation in messages))


def build_request(*, model: str, request_id: str, prompts: Prompts, options: GenerateOptions) -> Any:
    """A ``ModelInferRequest`` of ``len(prompts.rows)`` rows that all share ``options``.

    Raises InvalidRequestError when a value does not fit its tensor, TypeError for an option that does not
    exist.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    rows = len(prompts.rows)
    if prompts.spec is TOKEN_IDS:
        _add(request, prompts.spec, [_checked(prompts.spec, "input_ids", list(prompts.rows[0]))])
    else:
        _add(
            request, prompts.spec, [_checked(prompts.spec, prompts.spec.name, [row]) for row in prompts.rows]
        )
    traced = ("trace",) if options.get("trace") else ()
    for name in (*_READ_OUTPUTS, *traced) if traced or options.get("return_log_probs") else ():
        request.outputs.add(name=name)
    for option, value in options.items():
        if option not in OPTION_INPUTS and option != "trace":
            raise TypeError(f"unknown option {option!r}; there are {', '.join(OPTION_INPUTS)}")
        if value is None or option == "trace":
            continue
        spec = OPTION_INPUTS[option]
        values = _checked(spec, option, _as_list(option, value))
        if values:
            _add(request, spec, [values] * rows)
    for spec in _FIXED_INPUTS:
        _add(request, spec, [[True]] * rows)
    # Ends the stream even for a model that sends its final flag without data.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def read_response(response: Any) -> ResponseValues | None:
    """The values of a ``ModelInferResponse``, or None for one without tensors (an empty final response)."""
    if not response.outputs:
        return None
    result = InferResult(response)
    return ResponseValues(
        row=_integer(result, "batch_index") or 0,
        sequence=_integer(result, "sequence_index") or 0,
        text=_text(result, "text_output"),
        token_ids=tuple(int(token) for token in _flat(result, "output_ids")),
        finish_reason=_text(result, "finish_reason"),
        output_tokens=_integer(result, "num_output_tokens"),
        input_tokens=_integer(result, "num_input_tokens"),
        rounds=_integer(result, "num_rounds"),
        accepted_draft_tokens=_integer(result, "total_accepted_draft_tokens"),
        draft_tokens=_integer(result, "total_draft_tokens"),
        warning=_text(result, "warning"),
        log_probs=_log_probs(result),
        trace=tuple(json.loads(each) for each in _flat(result, "trace").tolist()),
    )


def build_bytes_request(*, model: str, name: str, value: bytes) -> Any:
    """A request with one BYTES input of shape [1]: how stage models are asked to describe themselves."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype="BYTES", shape=[1])
    request.raw_input_contents.append(_serialized([[value]]))
    return request


def _add(request: Any, spec: InputSpec, values: list[list[Any]]) -> None:
    """Appends a tensor of shape [len(values), len(values[0])]."""
    request.inputs.add(name=spec.name, datatype=spec.datatype, shape=[len(values), len(values[0])])
    if spec.datatype == "BYTES":
        request.raw_input_contents.append(_serialized(values))
    else:
        request.raw_input_contents.append(np.array(values, dtype=_DTYPES[spec.datatype]).tobytes())


def _serialized(values: list[list[bytes]]) -> bytes:
    content = serialize_byte_tensor(np.array(values, dtype=np.object_))
    return bytes(content.item())


def _as_list(option: str, value: Any) -> list[Any]:
    if option == "logit_bias":
        return [json.dumps({str(token): bias for token, bias in value.items()})]
    if option in ("guided_json", "chat_template_kwargs") and isinstance(value, Mapping):
        return [json.dumps(value)]
    if option in _LIST_OPTIONS and not isinstance(value, str):
        return list(value)
    return [value]


def _checked(spec: InputSpec, field: str, values: list[Any]) -> list[Any]:
    return [_checked_value(spec.datatype, field, value) for value in values]


def _checked_value(datatype: str, field: str, value: Any) -> Any:
    """``value`` ready for a tensor of this type, else InvalidRequestError naming the field."""
    if datatype == "BYTES":
        if not isinstance(value, str):
            raise InvalidRequestError(f"{field} must be a string, got {value!r}")
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{field} must be valid Unicode text: {error}") from None
    if datatype == "BOOL":
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{field} must be true or false, got {value!r}")
        return value
    # bool is an int in Python, and numpy's numbers are not: ask for what a number is used as.
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if datatype == "FP32":
        if not number and not isinstance(value, float | np.floating):
            raise InvalidRequestError(f"{field} must be a number, got {value!r}")
        return float(value)
    low, high = _INTEGER_RANGES[datatype]
    if not number or not low <= value <= high:
        raise InvalidRequestError(f"{field} must be an integer from {low} to {high}, got {value!r}")
    return int(value)


def _messages_json(messages: Sequence[Any]) -> str:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidRequestError(f'every message needs "role" and "content", got {message!r}')
    return json.dumps([dict(message) for message in messages], ensure_ascii=False)


def _log_probs(result: Any) -> tuple[TokenLogProbs, ...]:
    model, drawn = _flat(result, "output_log_probs").tolist(), _flat(result, "drawn_log_probs").tolist()
    ids, values = _flat(result, "top_log_prob_ids").tolist(), _flat(result, "top_log_probs").tolist()
    most = len(ids) // len(model) if model else 0
    # Servers of before have no bytes of tokens.
    tokens = _flat(result, "output_token_bytes").tolist() or [b""] * len(model)
    top_tokens = _flat(result, "top_log_prob_bytes").tolist()
    entries = []
    for place, (own, of_draw) in enumerate(zip(model, drawn, strict=True)):
        top = slice(place * most, (place + 1) * most)
        pairs = zip(ids[top], values[top], strict=True)
        tops = tuple((int(token), value) for token, value in pairs)
        entries.append(TokenLogProbs(own, of_draw, tops, tokens[place], tuple(top_tokens[top])))
    return tuple(entries)


def _flat(result: Any, name: str) -> Any:
    values = result.as_numpy(name)
    return np.empty(0) if values is None else values.reshape(-1)


def _integer(result: Any, name: str) -> int | None:
    values = _flat(result, name)
    return int(values[0]) if len(values) > 0 else None


def _text(result: Any, name: str) -> str:
    # The server cuts chunks at character borders; a broken byte is shown, not raised.
    return b"".join(_flat(result, name).tolist()).decode("utf-8", errors="replace")
