"""A target over several GPUs in the chart: what the server is told, and what does not go together."""

from __future__ import annotations

import re

import pytest

from tests.deploy.kube.helm import HelmError, Rendering, environment


def test_the_drafters_gpu_follows_those_of_the_target() -> None:
    settings = ("engine.tensorParallel=2", "gpu.count=3")
    shared = environment(Rendering("minimal", settings).server())
    split = environment(Rendering("two-gpus", settings).server())
    assert shared["DDTREE_TENSOR_PARALLEL"] == split["DDTREE_TENSOR_PARALLEL"] == "2"
    assert shared["DDTREE_DEVICE"] == split["DDTREE_DEVICE"] == "cuda:0"
    assert split["DDTREE_DRAFT_DEVICE"] == "cuda:2"
    assert environment(Rendering().server())["DDTREE_TENSOR_PARALLEL"] == "1"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("two-gpus", ("engine.tensorParallel=2",), "is 2 with gpu.placement split, .* at least 3, got 2"),
        ("minimal", ("engine.tensorParallel=2",), "is 2 with gpu.placement shared, .* at least 2, got 1"),
        ("engine", ("engine.tensorParallel=2", "gpu.count=2"), "must be 1 with engine.runtime trtllm, got 2"),
        ("minimal", ("engine.tensorParallel=0",), "tensorParallel"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(HelmError) as refused:
        Rendering(name, settings).text()
    assert re.search(message, refused.value.message), refused.value.message
