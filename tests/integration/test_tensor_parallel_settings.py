"""Settings that divide a target or put the drafter elsewhere: what they choose and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.errors import ConfigError
from ddtree.parallel.group import WorkerGroup
from ddtree.parallel.ranks import open_store
from ddtree.parallel.target import ParallelTarget
from tests.fakes.pipeline import generate_all, running_engine
from tests.fakes.tiny_models import make_draft, make_target
from tests.fakes.workers import requests, workers_left


def pair(folder: Path) -> dict[str, Any]:
    sizes = {
        "kv_cache_mib": 1,
        "draft_kv_cache_mib": 1,
        "page_size": 16,
        "max_nodes": 8,
        "max_step_nodes": 64,
    }
    target, draft = make_target(folder / "target"), make_draft(folder / "draft")
    return {"target": target, "draft": draft, "dtype": "float32", "device": "cpu", "threads": 1, **sizes}


async def test_settings_choose_ranks_and_the_drafters_device(tmp_path: Path) -> None:
    settings = pair(tmp_path)
    answers = []
    for changes in ({}, {"draft_device": "cpu"}, {"tensor_parallel": 2, "topology": "in_process"}):
        config = ServingConfig(**{**settings, **changes})
        stages = assembly.load_in_process(config)
        target = stages.verifier.target
        assert isinstance(target, ParallelTarget) is (config.tensor_parallel == 2) is dist.is_initialized()
        async with running_engine(stages.verifier, stages.drafter, config.target) as engine:
            answers.append([sink.token_ids for sink in await generate_all(engine, requests(12))])
        await stages.close()
        if isinstance(target, ParallelTarget):
            assert len(workers_left()) == 1
            target.close()
    assert answers[0] == answers[1] == answers[2]
    assert not dist.is_initialized()
    assert not workers_left()


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1, got 0"):
        ServingConfig(tmp_path, tmp_path, tensor_parallel=0)
    with pytest.raises(ConfigError, match="tensor_parallel must be 1 with engine trtllm, got 2"):
        ServingConfig(tmp_path, tmp_path, engine="trtllm", tensor_parallel=2)
    too_many = torch.cuda.device_count() + 2
    with pytest.raises(ConfigError, match=rf"at most the GPUs from cuda on, got {too_many} where there are"):
        WorkerGroup.start(too_many, torch.device("cuda"))
    dist.init_process_group("gloo", store=open_store(1, 5), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="got 2 where this process has joined a group already"):
        WorkerGroup.start(2, torch.device("cpu"))
    dist.destroy_process_group()
