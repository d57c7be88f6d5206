"""The watchdog that the chart's start script runs beside a real Triton, with a key that nobody was given."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_client import Client, DDTreeClientError
from tests.deploy.kube.helm import Rendering
from tests.deploy.test_helm_server import Served, _stub_of, image, start

pytestmark = [pytest.mark.triton, pytest.mark.timeout(200)]

__all__ = ["image"]  # the fixture


@pytest.fixture(scope="module")
def watched(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    rendering = Rendering("watchdog", ("server.exitTimeoutSeconds=3",))
    yield from start(rendering, image, tmp_path_factory.mktemp("watched"))


def test_a_killed_stage_is_waited_for_and_a_killed_orchestrator_ends_the_server(watched: Served) -> None:
    pod = watched.pod
    with Client(f"127.0.0.1:{pod.ports.grpc}", timeout_s=120) as client:
        before = client.generate("a", max_tokens=16, ignore_eos=True)
        assert watched.http("/v2/repository/models/drafter/unload", {}) == 403
        os.kill(_stub_of(pod.pid, "target_verifier"), signal.SIGKILL)
        assert client.generate("a", max_tokens=16, ignore_eos=True).token_ids == before.token_ids
        with client.stream("a", max_tokens=400, ignore_eos=True, draft_mode="off") as stream:
            chunks = iter(stream)
            next(chunks)
            os.kill(_stub_of(pod.pid, "ddtree"), signal.SIGKILL)
            with pytest.raises(DDTreeClientError) as told:
                list(chunks)
    assert told.value.code == "UNAVAILABLE"
    assert pod.held.stdout is not None
    assert select.select([pod.held.stdout], [], [], 30)[0], "the server did not end"
