"""The client and its command against the product: real models behind a real tritonserver, both topologies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ddtree_client import AsyncClient, Client, DeadlineExceededError, InvalidRequestError
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

PROMPT = tuple(b"The client asks")
TOKENS = 40


@pytest.fixture
def client(oracle_server: OracleServer) -> Iterator[Client]:
    oracle_server.set_noise(0.3)
    with oracle_server.client() as opened:
        yield opened
    oracle_server.assert_quiet()


@pytest.mark.parametrize("draft_mode", ["tree", "chain", "off"])
def test_every_draft_mode_gives_the_targets_own_answer(
    oracle_server: OracleServer, client: Client, draft_mode: str
) -> None:
    result = client.generate(
        input_ids=PROMPT, max_tokens=TOKENS, draft_mode=draft_mode, tree_budget=16, ignore_eos=True
    )
    assert len(result.token_ids) == TOKENS
    stats = result.stats
    assert (stats.input_tokens, stats.output_tokens) == (len(PROMPT), TOKENS)
    assert result.finish_reason == "length"
    if draft_mode == "off":
        assert (stats.acceptance_length, stats.draft_tokens, stats.acceptance_rate) == (1.0, 0, None)
    else:
        assert stats.acceptance_length is not None
        assert stats.acceptance_length > 1.2
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    plain = oracle_server.reference(PROMPT, TOKENS)
    assert list(result.token_ids)[: len(plain)] == plain


def test_chunks_join_to_the_answer(client: Client) -> None:
    stream = client.stream(input_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True)
    chunks = list(stream)
    assert len(chunks) > 3
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(chunk.text for chunk in chunks) == stream.result.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == stream.result.token_ids
    assert stream.result.text == client.generate(input_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True).text


def test_rows_are_answered_in_order(client: Client) -> None:
    prompts = ["one", "zwei ü", "three 🌳"]
    rows = client.generate_many(prompts, max_tokens=12, stop=["\x00\x00"])
    assert [row.text for row in rows] == [client.generate(prompt, max_tokens=12).text for prompt in prompts]


def test_leaving_the_loop_frees_the_session(oracle_server: OracleServer, client: Client) -> None:
    for _ in client.stream(input_ids=PROMPT, max_tokens=200, draft_mode="off", ignore_eos=True):
        break
    oracle_server.assert_quiet()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tree_budget": 100_000}, "tree_budget"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"draft_mode": "bush"}, "draft_mode"),
        ({"stop": ["x"] * 1000}, "stop_words"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_name_the_field(client: Client, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        client.generate("hi", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        client.generate("")


async def test_tasks_side_by_side_and_a_missed_deadline(oracle_server: OracleServer, client: Client) -> None:
    before = client.generate(input_ids=PROMPT, max_tokens=TOKENS).token_ids
    async with AsyncClient(oracle_server.triton.grpc_url, timeout_s=60.0) as other:
        asked = (
            other.generate(input_ids=PROMPT, max_tokens=TOKENS, draft_mode=mode)
            for mode in ("tree", "chain", "off", "tree", "tree", "chain", "off", "tree")
        )
        assert {result.token_ids for result in await asyncio.gather(*asked)} == {before}
        with pytest.raises(DeadlineExceededError):
            await other.generate(
                input_ids=PROMPT, max_tokens=200, draft_mode="off", ignore_eos=True, deadline_s=0.01
            )


def test_health_shows_what_the_stages_hold(oracle_server: OracleServer, client: Client) -> None:
    state = client.health()
    assert state.model_ready("ddtree")
    if oracle_server.topology == "in_process":
        assert state.stages == {}
        return
    assert set(state.stages) == {"target_verifier", "drafter"}
    usage = state.stages["target_verifier"]["usage"]
    assert (usage["sessions"], usage["pages_used"]) == (0, 0)
    assert usage["pages_total"] > 0


def test_the_command_answers(oracle_server: OracleServer, client: Client) -> None:
    command = [
        sys.executable,
        "-c",
        "from ddtree_client.cli import main; main()",
        "generate",
        "--raw",
        "--json",
    ]
    arguments = ["--url", oracle_server.triton.grpc_url, "--max-tokens", "8", "Grüße"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, encoding="utf-8", timeout=60, check=True
    )
    assert tuple(json.loads(done.stdout)["token_ids"]) == client.generate("Grüße", max_tokens=8).token_ids
