"""Everything about choosing tokens, through a real server in either topology."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ddtree.sampling_spec import SamplingSpec
from ddtree_client import InvalidRequestError, Result
from tests.fakes.tiny_models import EOS_ID
from tests.oracles.sampled_decoding import Decoded, SampledReference
from tests.triton.echo_server import Stream, flags, floats, ints
from tests.triton.oracle_server import OracleServer, TinyPair

pytestmark = pytest.mark.triton

PROMPT = tuple(b"a prompt of more than one chunk of prefill")
MODES = [("tree", 24), ("chain", 5), ("off", -1)]


@pytest.fixture(autouse=True)
def quiet_afterwards(oracle_server: OracleServer) -> Iterator[None]:
    yield
    oracle_server.assert_quiet()


@pytest.fixture(scope="module")
def reference(tiny_pair: TinyPair) -> SampledReference:
    return SampledReference(tiny_pair.target)


def decode(server: OracleServer, mode: tuple[str, int], **options: Any) -> Result:
    with server.client() as client:
        return client.generate(
            input_ids=PROMPT, max_tokens=24, draft_mode=mode[0], tree_budget=mode[1], **options
        )


def by_the_book(reference: SampledReference, spec: SamplingSpec) -> Decoded:
    return reference(PROMPT, spec, 24, frozenset({EOS_ID}))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_sampling_with_everything_on(
    oracle_server: OracleServer, reference: SampledReference, mode: tuple[str, int]
) -> None:
    """The settings cross to the verifier and back; the answer is that of plain decoding."""
    result = decode(
        oracle_server, mode, temperature=0.5, top_k=40, top_p=0.95, min_p=0.01, seed=2**64 - 3,
        repetition_penalty=1.2, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={7: 1.5},
        min_tokens=6, return_log_probs=True, num_top_log_probs=2,
    )  # fmt: skip
    expected = by_the_book(
        reference,
        SamplingSpec(
            temperature=0.5, top_k=40, top_p=float(np.float32(0.95)), min_p=float(np.float32(0.01)),
            seed=2**64 - 3, repetition_penalty=float(np.float32(1.2)), presence_penalty=0.25,
            frequency_penalty=0.5, logit_bias=((7, 1.5),), min_tokens=6, stop_ids=(EOS_ID,),
        ),
    )  # fmt: skip
    assert list(result.token_ids) == expected.tokens
    assert len(result.log_probs) == len(expected.tokens)
    for token, entry, model, drawn in zip(
        expected.tokens, result.log_probs, expected.model, expected.drawn, strict=True
    ):
        assert math.isclose(entry.model, float(model[token]), abs_tol=1e-4)
        assert math.isclose(entry.drawn, drawn, abs_tol=1e-4)
        assert [token_id for token_id, _ in entry.top] == model.topk(2).indices.tolist()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_guided_answers_are_valid(oracle_server: OracleServer, mode: tuple[str, int]) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    value = json.loads(decode(oracle_server, mode, guided_json=schema, temperature=1.0, seed=4).text)
    assert 0 <= value["n"] <= 99
    assert isinstance(value["ok"], bool)
    assert re.fullmatch("[ab]{3}c*", decode(oracle_server, mode, guided_regex="[ab]{3}c{0,9}").text)
    assert decode(oracle_server, mode, guided_choice=["north", "south"]).text in ("north", "south")
    assert decode(oracle_server, mode, guided_grammar='root ::= "x" root | "y"').text[0] in "xy"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"min_tokens": 25}, "min_tokens must not be above max_tokens 24, got 25"),
        ({"top_k": -2}, "top_k must be -1 or 0"),
        ({"guided_regex": "("}, r"guided_regex cannot be used: .*unclosed group"),
        ({"guided_json": "[" * 3000}, "guided_json must be JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "one grammar can guide a sequence"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_started(
    oracle_server: OracleServer, options: dict[str, Any], complaint: str
) -> None:
    def ask() -> None:
        with pytest.raises(InvalidRequestError, match=complaint):
            decode(oracle_server, MODES[0], **options)

    oracle_server.assert_reaches_no_stage(ask)


def test_several_sequences_of_each_row(oracle_server: OracleServer, reference: SampledReference) -> None:
    stream = Stream(grpc.InferenceServerClient(oracle_server.triton.grpc_url))
    with closing(stream.client):
        stream.open()
        received = stream.ask(
            {
                "input_ids": np.array([PROMPT], dtype=np.int32),
                "max_tokens": ints(24),
                "temperature": floats(1.0),
                "random_seed": np.array([[9]], dtype=np.uint64),
                "num_return_sequences": ints(3),
                "return_log_probs": flags(True),
            }
        )
    assert [answer.error for answer in received] == [""] * 3
    found = {int(answer.outputs["sequence_index"].item()): answer.outputs for answer in received}
    for index in range(3):
        expected = by_the_book(reference, SamplingSpec(temperature=1.0, seed=9, sequence_index=index))
        assert found[index]["output_ids"].reshape(-1).tolist() == expected.tokens
        total = sum(float(model[token]) for token, model in zip(expected.tokens, expected.model, strict=True))
        assert math.isclose(float(found[index]["cum_log_probs"].item()), total, abs_tol=1e-2)
