"""Callers of different keys do not share cached prompts, by the server's own count of hits."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ddtree_gateway import Settings
from tests.triton.gateway.running import running
from tests.triton.oracle_server import OracleServer
from tests.triton.test_prefix_cache import PAGE, hits_until_now, wait_for_hits

pytestmark = pytest.mark.triton


def test_only_callers_of_one_key_and_salt_share_prompts(tiny_server: OracleServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ours\ntheirs\n")
    settings = Settings(endpoints=(tiny_server.triton.grpc_url,), served_names=("m",), api_keys=keys)
    prompt = [7 * n % 251 for n in range(PAGE + 9)]
    before, hits = hits_until_now(tiny_server), 0
    with running(settings) as gateway:
        for key, salt, is_hit in (
            ("ours", None, False), ("ours", None, True), ("theirs", None, False), ("theirs", None, True),
            ("theirs", "apart", False), ("theirs", "apart", True), ("ours", "apart", False),
        ):  # fmt: skip
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "cache_salt": salt}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30)
            assert answer.status_code == 200, answer.text
            hits += PAGE * is_hit
            wait_for_hits(tiny_server, before + hits)
