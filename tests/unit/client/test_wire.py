"""Options become tensors, responses become values."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2

from ddtree_client import wire
from ddtree_client.errors import InvalidRequestError
from ddtree_client.types import GenerateOptions, TokenLogProbs
from ddtree_client.wire import OPTION_INPUTS, Prompts, build_request, many_prompts, one_prompt, read_response


def tensors(
    prompts: Prompts, options: GenerateOptions | None = None
) -> dict[str, tuple[str, list[int], bytes]]:
    request = build_request(model="ddtree", request_id="r", prompts=prompts, options=options or {})
    assert len(request.inputs) == len(request.raw_input_contents)
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), content)
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def as_bytes(*values: str) -> bytes:
    """Triton's form of strings: each with its length in front."""
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def test_scalars_have_a_row_for_every_prompt() -> None:
    sent = tensors(many_prompts(["a", "ü"], None), {"max_tokens": 3, "seed": 2**64 - 1, "top_p": 0.5})
    assert sent["text_input"] == ("BYTES", [2, 1], as_bytes("a", "ü"))
    assert sent["max_tokens"] == ("INT32", [2, 1], struct.pack("<2i", 3, 3))
    assert sent["seed"] == ("UINT64", [2, 1], struct.pack("<2Q", 2**64 - 1, 2**64 - 1))
    assert sent["top_p"] == ("FP32", [2, 1], struct.pack("<2f", 0.5, 0.5))
    assert sent["stream"] == ("BOOL", [2, 1], b"\1\1")


def test_lists_are_repeated_for_every_row() -> None:
    sent = tensors(many_prompts(["a", "b"], None), {"stop": ["x", "yz"]})
    assert sent["stop_words"] == ("BYTES", [2, 2], as_bytes("x", "yz", "x", "yz"))


def test_one_stop_string_is_not_taken_for_letters() -> None:
    assert tensors(one_prompt("a", None, None), {"stop": "ab"})["stop_words"] == (
        "BYTES",
        [1, 1],
        as_bytes("ab"),
    )


def test_what_is_absent_or_empty_is_not_sent() -> None:
    without = tensors(one_prompt("a", None, None))
    assert tensors(one_prompt("a", None, None), {"max_tokens": None, "stop": (), "seed": None}) == without
    assert set(without) == {
        "text_input",
        "stream",
        "exclude_input_in_output",
        "return_num_input_tokens",
        "return_num_output_tokens",
    }


def test_messages_travel_as_json_with_their_letters() -> None:
    messages = [{"role": "user", "content": "Grüße 🌳"}]
    datatype, shape, content = tensors(one_prompt(None, messages, None))["messages"]
    assert (datatype, shape) == ("BYTES", [1, 1])
    assert json.loads(content[4:]) == messages
    assert "Grüße".encode() in content


def test_token_ids_are_one_row() -> None:
    sent = tensors(one_prompt(None, None, [0, 7, 5]))
    assert sent["input_ids"] == ("INT32", [1, 3], struct.pack("<3i", 0, 7, 5))


def test_numpy_numbers_are_numbers() -> None:
    options: Any = {"max_tokens": np.int64(3), "temperature": np.float32(0.5)}
    sent = tensors(one_prompt(None, None, list(np.array([1, 2]))), options)
    assert sent["max_tokens"][2] == struct.pack("<i", 3)
    assert sent["temperature"][2] == struct.pack("<f", 0.5)


def test_logit_bias_is_json() -> None:
    sent = tensors(one_prompt("a", None, None), {"logit_bias": {7: -1.5}})
    assert sent["logit_bias"] == ("BYTES", [1, 1], as_bytes('{"7": -1.5}'))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_tokens": 2**31},
            "max_tokens must be an integer from -2147483648 to 2147483647, got 2147483648",
        ),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"seed": -1}, "seed must be an integer from 0 to 18446744073709551615, got -1"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": False}, "temperature must be a number"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"stop": [3]}, "stop must be a string, got 3"),
        ({"stop": ["\ud800"]}, "stop must be valid Unicode"),
        ({"draft_mode": 2}, "draft_mode must be a string, got 2"),
    ],
)
def test_values_that_fit_no_tensor_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tensors(one_prompt("a", None, None), options)
    assert caught.value.message.startswith(message)


def test_an_unknown_option_is_a_type_error() -> None:
    options: Any = {"max_token": 3}
    with pytest.raises(TypeError, match=r"'max_token'.*max_tokens"):
        tensors(one_prompt("a", None, None), options)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ((None, None, None), "none of them"),
        (("a", None, [1]), "prompt and input_ids"),
        (("a", [{"role": "user", "content": "b"}], None), "prompt and messages"),
    ],
)
def test_exactly_one_form_of_prompt(arguments: Any, got: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"exactly one of prompt, messages and input_ids, got {got}$"
    ):
        one_prompt(*arguments)


@pytest.mark.parametrize(
    ("prompts", "messages"), [(None, None), (["a"], [[]]), ("abc", None), ([], None), (None, [])]
)
def test_rows_are_a_list_of_one_kind(prompts: Any, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        many_prompts(prompts, messages)


@pytest.mark.parametrize("message", ["hi", {"role": "user"}, {"content": "x"}])
def test_a_message_has_role_and_content(message: Any) -> None:
    with pytest.raises(InvalidRequestError, match='needs "role" and "content"'):
        one_prompt(None, [message], None)


def test_the_fake_model_declares_every_input_of_the_client() -> None:
    config = (Path(__file__).parents[2] / "fakes/contract_model/config.pbtxt").read_text(encoding="utf-8")
    for spec in OPTION_INPUTS.values():
        datatype = {"BYTES": "STRING"}.get(spec.datatype, spec.datatype)
        assert f'name: "{spec.name}" data_type: TYPE_{datatype} ' in config


def response(**outputs: tuple[str, list[int], bytes]) -> Any:
    message = service_pb2.ModelInferResponse(model_name="ddtree")
    for name, (datatype, shape, content) in outputs.items():
        message.outputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_output_contents.append(content)
    return message


def test_a_response_without_tensors_says_nothing() -> None:
    assert read_response(response()) is None


def test_a_response_is_read_whatever_its_shapes() -> None:
    values = read_response(
        response(
            batch_index=("INT32", [1, 1], struct.pack("<i", 2)),
            text_output=("BYTES", [1], as_bytes("ö✓")),
            output_ids=("INT32", [1, 1, 2], struct.pack("<2i", 9, 0)),
            finish_reason=("BYTES", [1], as_bytes("length")),
            num_output_tokens=("INT32", [1], struct.pack("<i", 2)),
            num_rounds=("INT32", [1, 1], struct.pack("<i", 0)),
        )
    )
    assert values is not None
    assert (values.row, values.text, values.token_ids, values.finish_reason) == (2, "ö✓", (9, 0), "length")
    assert (values.output_tokens, values.rounds) == (2, 0)
    assert (values.input_tokens, values.draft_tokens, values.accepted_draft_tokens) == (None, None, None)


def test_log_probs_are_read_with_and_without_alternatives() -> None:
    outputs = {
        "output_ids": ("INT32", [1, 1, 2], struct.pack("<2i", 9, 0)),
        "output_log_probs": ("FP32", [1, 1, 2], struct.pack("<2f", -0.5, -1.5)),
        "drawn_log_probs": ("FP32", [1, 1, 2], struct.pack("<2f", -0.25, 0.0)),
    }
    values = read_response(response(**outputs))
    assert values is not None
    assert values.log_probs == (TokenLogProbs(-0.5, -0.25, ()), TokenLogProbs(-1.5, 0.0, ()))
    outputs["top_log_prob_ids"] = ("INT32", [1, 2, 2], struct.pack("<4i", 9, 4, 3, 0))
    outputs["top_log_probs"] = ("FP32", [1, 2, 2], struct.pack("<4f", -0.5, -2.0, -1.0, -1.5))
    values = read_response(response(**outputs))
    assert values is not None
    assert [entry.top for entry in values.log_probs] == [((9, -0.5), (4, -2.0)), ((3, -1.0), (0, -1.5))]


def test_grammars_are_sent_as_text() -> None:
    schema = {"type": "object", "title": "ä"}
    sent = tensors(one_prompt("a", None, None), {"guided_json": schema, "guided_choice": ["a", "b"]})
    assert json.loads(sent["guided_json"][2][4:]) == schema
    assert sent["guided_choice"][1] == [1, 2]
    assert tensors(one_prompt("a", None, None), {"guided_json": "{}"})["guided_json"][2][4:] == b"{}"


def test_broken_utf8_is_shown_not_raised() -> None:
    values = read_response(response(text_output=("BYTES", [1], struct.pack("<I", 2) + b"a\xff")))
    assert values is not None
    assert values.text == "a\ufffd"


def test_a_traced_request_lists_all_outputs_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who lists outputs gets no others.
    read: set[str] = set()

    class Recording(InferResult):  # type: ignore[misc]  # tritonclient has no types
        def as_numpy(self, name: str) -> Any:
            read.add(name)
            return super().as_numpy(name)

    monkeypatch.setattr(wire, "InferResult", Recording)
    response = service_pb2.ModelInferResponse(model_name="ddtree")
    response.outputs.add(name="batch_index", datatype="INT32", shape=[1])
    response.raw_output_contents.append(b"\x00\x00\x00\x00")
    assert read_response(response) is not None

    def outputs_of(options: GenerateOptions) -> set[str]:
        prompts = one_prompt("hi", None, None)
        request = build_request(model="ddtree", request_id="1", prompts=prompts, options=options)
        return {output.name for output in request.outputs}

    assert outputs_of({"trace": True}) == read
    assert outputs_of({"return_log_probs": True}) == read - {"trace"}
    assert outputs_of({"trace": False}) == outputs_of({}) == set()
