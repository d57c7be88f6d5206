"""A stage as a Triton model: named arrays in, one operation, named arrays out.

What a stage can be asked is `ddtree.stages.operations`' business. A stage answers one call at a time and
never raises into Triton: what goes wrong becomes an error response of that call.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from ddtree import logs
from ddtree.config import ServingConfig
from ddtree.errors import DDTreeError
from ddtree.stages.operations import Operation, drafter_operations, exchange, verifier_operations
from ddtree.tree import build_trees
from ddtree.types import TreeRequest

_LOG = logging.getLogger(__name__)


class _StageModel(ABC):
    """What the three stages share: reading a call, running its operation, answering it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the stage; an error here stops the server with its message."""
        logs.configure(args["model_name"])
        self._operations = self._load(json.loads(args["model_config"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each call."""
        return [self._answer(request) for request in requests]

    @abstractmethod
    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        """Load the stage and give its operations by name."""

    def _answer(self, request: Any) -> Any:
        name = ""
        try:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            name = bytes(arrays.pop("op")[0]).decode()
            started = time.perf_counter()
            with torch.inference_mode():
                outputs = self._operations[name](arrays)
            # What is left of the caller's round trip is the hop.
            outputs["stage_ms"] = np.array([(time.perf_counter() - started) * 1e3], dtype=np.float32)
            return pb_utils.InferenceResponse([pb_utils.Tensor(key, array) for key, array in outputs.items()])
        except DDTreeError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        except KeyError as error:
            known = ", ".join(sorted(self._operations))
            message = f"INVALID_ARGUMENT: no operation or input {error}; operations are {known}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
        except Exception as error:  # noqa: BLE001 - the stage outlives a call that failed
            _LOG.exception("a call failed: %s", error, extra={"operation": name})
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"INTERNAL: {error}"))


class TargetVerifierModel(_StageModel):
    """The model `target_verifier`."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        from ddtree.assembly import load_verifier  # not for the tree builder, which needs no transformers
        from ddtree.feature_references import VerifierReferences

        config = ServingConfig.from_triton(model_config)
        verifier = load_verifier(config)
        refers = VerifierReferences.of(verifier, config.features_by_reference)
        return verifier_operations(verifier, refers)


class DrafterModel(_StageModel):
    """The model `drafter`."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        from ddtree.assembly import load_drafter
        from ddtree.feature_references import DrafterReferences

        config = ServingConfig.from_triton(model_config)
        drafter = load_drafter(config)
        refers = DrafterReferences.of(drafter, config.features_by_reference)
        return drafter_operations(drafter, refers)


class TreeBuilderModel(_StageModel):
    """The model `tree_builder`; it keeps nothing between calls."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        del model_config
        torch.set_num_threads(1)  # this process must not spin beside the other stages' threads
        return {"build_tree": exchange(build_trees, TreeRequest, torch.float32)}
