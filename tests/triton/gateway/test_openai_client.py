"""The official `openai` package against the gateway on a real server with the small pair."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from ddtree_client import Client
from tests.triton.gateway.running import MESSAGES, MODEL, Gateway
from tests.triton.oracle_server import SPARK, SPOKEN, OracleServer

pytestmark = pytest.mark.triton


def ids_of(server: OracleServer, text: str) -> list[int]:
    return list(server.codec.encode(text))


def streamed(client: OpenAI, **more: Any) -> str:
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **more)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_greedy_answers_are_the_models_own(openai_client: OpenAI, tiny_server: OracleServer) -> None:
    prompt = "The sky is"
    answer = openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0)
    expected = tiny_server.reference(ids_of(tiny_server, prompt), 24)
    assert answer.choices[0].text == tiny_server.codec.decode(expected)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids_of(tiny_server, prompt))
    assert answer.usage.completion_tokens == len(expected)


def test_a_chat_is_rendered_by_the_server(openai_client: OpenAI, tiny_server: OracleServer) -> None:
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0
    )
    expected = tiny_server.reference(tiny_server.codec.render_messages(MESSAGES), 16)
    assert answer.choices[0].message.content == tiny_server.codec.decode(expected)
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")


def test_a_stream_joins_to_the_whole_answer(openai_client: OpenAI) -> None:
    whole = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, max_tokens=24)
    assert streamed(openai_client, seed=5, max_tokens=24) == whole.choices[0].message.content
    assert streamed(openai_client, seed=6, max_tokens=24) != whole.choices[0].message.content


def test_drafting_does_not_change_an_answer_and_is_reported(openai_client: OpenAI) -> None:
    def ask(**extra: Any) -> Any:
        return openai_client.completions.create(
            model=MODEL, prompt="abc", max_tokens=40, temperature=0, extra_body=extra
        )

    drafted, plain = ask(tree_budget=16), ask(draft_mode="off")
    assert drafted.choices[0].text == plain.choices[0].text
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    speculation = drafted.metrics["speculative_decoding"]
    assert speculation["num_accepted_draft_tokens"] == details.accepted_prediction_tokens
    steps = sum(speculation["acceptance_histogram"])
    assert speculation["num_spec_steps"] == steps
    # The prefill gives the first token, every round what it accepted and one more.
    assert drafted.usage.completion_tokens == 1 + steps + speculation["num_accepted_draft_tokens"]


def test_n_answers_are_of_one_prompt(openai_client: OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, seed=9, max_tokens=12, temperature=1
    )
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage is not None
    one = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=9, max_tokens=12)
    assert one.choices[0].message.content == texts[0]
    assert one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens


def test_several_prompts_and_token_ids(openai_client: OpenAI, tiny_server: OracleServer) -> None:
    prompts = ["one", "and two"]
    texts = openai_client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0)
    ids = openai_client.completions.create(
        model=MODEL, prompt=[ids_of(tiny_server, each) for each in prompts], max_tokens=8, temperature=0
    )
    assert [choice.text for choice in texts.choices] == [choice.text for choice in ids.choices]
    expected = [tiny_server.reference(ids_of(tiny_server, each), 8) for each in prompts]
    assert [choice.text for choice in ids.choices] == [tiny_server.codec.decode(each) for each in expected]
    stream = openai_client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, stream=True
    )
    joined = ["", ""]
    for chunk in stream:
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == [choice.text for choice in texts.choices]


def test_stop_strings_are_not_shown(openai_client: OpenAI) -> None:
    def ask(**more: Any) -> Any:
        # SPARK makes the small model say SPOKEN, whatever came before.
        return openai_client.completions.create(model=MODEL, prompt=[SPARK], temperature=0, **more).choices[0]

    assert ask(max_tokens=9).text == SPOKEN
    stopped = ask(max_tokens=9, stop="é")
    assert (stopped.text, stopped.finish_reason) == (SPOKEN[:1], "stop")


def test_log_probs_spell_the_answer(openai_client: OpenAI) -> None:
    choice = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 12
    spelled = b"".join(bytes(entry.bytes or []) for entry in content).decode(errors="replace")
    assert spelled == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)  # greedy
        assert entry.token == entry.top_logprobs[0].token


def test_log_probs_of_a_completion_have_offsets(openai_client: OpenAI) -> None:
    choice = openai_client.completions.create(
        model=MODEL, prompt=[SPARK], max_tokens=3, temperature=0, logprobs=2
    ).choices[0]
    assert choice.logprobs is not None
    # The three are the first bytes of a character that has four: there is no text before it is whole.
    assert choice.logprobs.tokens == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98"]
    assert choice.logprobs.text_offset == [0, 0, 0]
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [2, 2, 2]


def test_logit_bias_forbids_and_forces(openai_client: OpenAI, tiny_server: OracleServer) -> None:
    (letter,) = ids_of(tiny_server, "Q")
    forced = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logit_bias={str(letter): 100}
    )
    assert forced.choices[0].message.content == "QQQQ"


def test_a_schema_binds(openai_client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "sign": {"enum": ["+", "-"]}},
        "required": ["ok", "sign"],
        "additionalProperties": False,
    }
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    assert value.keys() == {"ok", "sign"}
    chosen = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"guided_choice": ["red", "green"]}, max_tokens=9
    )
    assert chosen.choices[0].message.content in ("red", "green")


def test_template_variables_reach_the_template(openai_client: OpenAI) -> None:
    def tokens(**variables: Any) -> int:
        answer = openai_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=1, extra_body={"chat_template_kwargs": variables}
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert tokens(note="four") == tokens(note="") + 4
    with pytest.raises(openai.BadRequestError, match="'tokenize'") as refused:
        tokens(tokenize=True)
    assert refused.value.param == "chat_template_kwargs"


def test_a_deadline_ends_an_answer_with_what_there_is(openai_client: OpenAI) -> None:
    for deadline in (0.1, 0.4, 1.6):  # a busy machine may not come to the first token so soon
        try:
            answer = openai_client.completions.create(
                model=MODEL,
                prompt="go on",
                max_tokens=450,
                temperature=0,
                extra_body={"deadline": deadline, "ignore_eos": True, "draft_mode": "off"},
            )
        except openai.APIStatusError:
            continue
        if answer.usage is not None and answer.usage.completion_tokens:
            break
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens < 450
    assert answer.choices[0].finish_reason == "length"  # the API has no nearer word


def test_thinking_with_a_drafter_that_never_thought_is_pointed_out(openai_client: OpenAI) -> None:
    def ask(**variables: Any) -> Any:
        extra = {"chat_template_kwargs": variables}
        return openai_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, n=2, extra_body=extra
        )

    (warning,) = ask().warnings
    assert "trained without thinking" in warning
    assert "warnings" not in ask(enable_thinking=False).model_extra


def test_models_are_listed(openai_client: OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    assert openai_client.models.retrieve(MODEL).owned_by == "ddtree"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt-9")


async def test_the_async_client_streams_in_parallel(gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=seed, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(ask(seed % 4) for seed in range(8)))
    assert texts[:4] == texts[4:]
    assert len(set(texts)) == 4


def test_the_gateway_and_the_client_say_the_same(openai_client: OpenAI, tiny_server: OracleServer) -> None:
    with Client(tiny_server.triton.grpc_url) as client:
        direct = client.generate("same?", max_tokens=20, temperature=0.7, seed=11).text
    answer = openai_client.completions.create(
        model=MODEL, prompt="same?", max_tokens=20, temperature=0.7, seed=11
    )
    assert answer.choices[0].text == direct
