"""One server of the small pair for the tests of the gateway, and one gateway before it.

Not the server of the other tests: callers leave in crowds here, and Triton 2.51 does not always survive that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

from ddtree.text import TextCodec
from ddtree_gateway import Settings
from ddtree_local.server import LocalTriton
from tests.fakes.pipeline import GreedyReference
from tests.triton.gateway.running import Gateway, running
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository
from tests.triton.shared_server import SharedServer


@pytest.fixture(scope="session")
def tiny_server(
    tmp_path_factory: pytest.TempPathFactory,
    project_root: Path,
    tiny_pair: TinyPair,
    tiny_reference: GreedyReference,
) -> Iterator[OracleServer]:
    repository = make_repository(
        tmp_path_factory.mktemp("gateway") / "models", project_root / "model_repository", "in_process"
    )
    shutil.copytree(project_root / "model_repository_unary" / "ddtree_unary", repository / "ddtree_unary")
    (tiny_pair.draft / "README.md").write_text("Trained with `enable_thinking=False`.")
    make = partial(
        LocalTriton,
        repository,
        load_models=["ddtree", "ddtree_unary"],
        env=tiny_pair.environment("in_process"),
        log_path=tmp_path_factory.mktemp("log") / "triton.log",
    )
    codec = TextCodec.from_folder(tiny_pair.target)
    with SharedServer(make(), "in_process", repository, codec, tiny_reference, make=make) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(tiny_server: OracleServer) -> Iterator[Gateway]:
    with running(Settings(endpoints=(tiny_server.triton.grpc_url,), default_max_tokens=32)) as gateway:
        yield gateway


@pytest.fixture
def openai_client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
