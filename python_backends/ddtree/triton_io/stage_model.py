"""A stage as a Triton model: named arrays in, one operation, named arrays out.

What a stage can be asked is `ddtree.stages.operations`' business. A stage answers one call at a time and
never raises into Triton: what goes wrong becomes an error response of that call.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from ddtree import logs
from ddtree.config import ServingConfig, expand
from ddtree.stages.operations import (
    CallFailed,
    Operation,
    drafter_operations,
    exchange,
    perform,
    verifier_operations,
)
from ddtree.stages.server import StageServer
from ddtree.tree import build_trees
from ddtree.types import TreeRequest
from ddtree.wire import Arrays

_LOG = logging.getLogger(__name__)
_Call = Callable[[str, Arrays], Arrays]


class _StageModel(ABC):
    """What the three stages share: reading a call, having its operation run, answering it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the stage; an error here stops the server with its message."""
        logs.configure(args["model_name"])
        config = json.loads(args["model_config"])
        load = partial(self._load, config)
        self._server: StageServer | None = None
        if _offers_channel(config):
            self._server = StageServer(args["model_name"], load)
            self._call: _Call = self._server.call
        else:
            self._call = partial(perform, load())

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each call."""
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """Take no more direct calls."""
        if self._server is not None:
            self._server.close()

    @abstractmethod
    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        """Load the stage and give its operations by name."""

    def _answer(self, request: Any) -> Any:
        name = ""
        try:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            name = bytes(arrays.pop("op")[0]).decode()
            outputs = self._call(name, arrays)
            return pb_utils.InferenceResponse([pb_utils.Tensor(key, array) for key, array in outputs.items()])
        except CallFailed as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        except Exception as error:  # noqa: BLE001 - the stage outlives a call that failed
            _LOG.exception("a call failed: %s", error, extra={"operation": name})
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"INTERNAL: {error}"))


def _offers_channel(model_config: Mapping[str, Any]) -> bool:
    """Whether a stage can be called directly; of an engine nobody knows which threads it may load in."""
    parameters = model_config.get("parameters", {})
    calls, engine = (
        expand(parameters.get(name, {}).get("string_value", ""), os.environ).strip()
        for name in ("stage_calls", "engine")
    )
    return calls != "triton" and engine in ("", "torch")


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
