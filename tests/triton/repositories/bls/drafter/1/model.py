"""The drafter stage with the tests' oracle instead of a DFlash draft; everything else of a stage is real.

The oracle's file is named by DDTREE_TEST_ORACLE: the tests are no installed package. Three operations more
than a drafter has: `set_noise`, `set_pause` (its seconds come as `noise`), and `lose`, which forgets all
sessions at the next draft.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddtree.config import ServingConfig
from ddtree.feature_references import DrafterReferences
from ddtree.models.draft_checkpoint import draft_hash, open_checkpoint
from ddtree.shared_features import FeatureReader
from ddtree.stages.operations import Operation, drafter_operations
from ddtree.triton_io import stage_model
from ddtree.wire import Arrays


def _load_oracle(config: ServingConfig) -> Any:
    spec = importlib.util.spec_from_file_location("oracle_drafter", os.environ["DDTREE_TEST_ORACLE"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    block_size = open_checkpoint(config.draft).config.block_size
    return module.OracleDrafter(
        config.target, block_size=block_size, draft_hash=draft_hash(config.draft), noise=0.6
    )


class TritonPythonModel(stage_model._StageModel):
    """The model `drafter`."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        config = ServingConfig.from_triton(model_config)
        torch.set_num_threads(1)
        oracle = _load_oracle(config)
        # It uses no features, but those it is given are read: whose references are stale has none.
        refers = DrafterReferences(FeatureReader(torch.device("cpu"), oracle.feature_dtype), is_wanted=True)

        def set_noise(arrays: Mapping[str, Any]) -> Arrays:
            oracle.noise = float(arrays["noise"][0])
            return _done()

        def set_pause(arrays: Mapping[str, Any]) -> Arrays:
            oracle.pause_s = float(arrays["noise"][0])
            return _done()

        def lose(_: Mapping[str, Any]) -> Arrays:
            oracle.lose_next = True
            return _done()

        return {
            **drafter_operations(oracle, refers),
            "set_noise": set_noise,
            "set_pause": set_pause,
            "lose": lose,
        }


def _done() -> Arrays:
    return {"status": np.zeros(1, dtype=np.int32)}
