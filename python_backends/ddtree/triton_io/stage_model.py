"""A stage as a Triton model: named arrays in, one operation, named arrays out.

Every operation of a stage is `message in, message out`; the codec is `ddtree.wire`. A stage answers one call
at a time and never raises into Triton: what goes wrong becomes an error response of that call.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from ddtree import logs
from ddtree.config import ServingConfig
from ddtree.errors import DDTreeError
from ddtree.tree import build_trees
from ddtree.types import DraftRequest, FeatureRequest, PrefillRequest, TreeRequest, VerifyRequest
from ddtree.wire import Arrays, decode, encode

_LOG = logging.getLogger(__name__)
Operation = Callable[[Mapping[str, Any]], Arrays]


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


def _exchange(call: Callable[[Any], Any], message_type: type, feature_dtype: torch.dtype) -> Operation:
    return lambda arrays: encode(call(decode(message_type, arrays, feature_dtype)))


def _describe(info: Callable[[], Any]) -> Operation:
    return lambda _: {"info": np.array([json.dumps(asdict(info())).encode()], dtype=np.object_)}


def _release(stage: Any) -> Operation:
    def release(arrays: Mapping[str, Any]) -> Arrays:
        usage = stage.release(arrays["session_ids"].tolist())
        return {"status": np.array([usage.sessions, usage.pages_used], dtype=np.int32)}

    return release


class TargetVerifierModel(_StageModel):
    """The model `target_verifier`."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        from ddtree.assembly import load_verifier  # not for the tree builder, which needs no transformers

        verifier = load_verifier(ServingConfig.from_triton(model_config))
        dtype = verifier.feature_dtype
        return {
            "describe": _describe(verifier.info),
            "release": _release(verifier),
            "prefill": _exchange(verifier.prefill, PrefillRequest, dtype),
            "verify": _exchange(verifier.verify, VerifyRequest, dtype),
            "read_features": _exchange(verifier.read_features, FeatureRequest, dtype),
        }


class DrafterModel(_StageModel):
    """The model `drafter`."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        from ddtree.assembly import load_drafter

        drafter = load_drafter(ServingConfig.from_triton(model_config))
        return {
            "describe": _describe(drafter.info),
            "release": _release(drafter),
            "draft": _exchange(drafter.draft, DraftRequest, drafter.feature_dtype),
        }


class TreeBuilderModel(_StageModel):
    """The model `tree_builder`; it keeps nothing between calls."""

    def _load(self, model_config: Mapping[str, Any]) -> dict[str, Operation]:
        del model_config
        torch.set_num_threads(1)  # this process must not spin beside the other stages' threads
        return {"build_tree": _exchange(build_trees, TreeRequest, torch.float32)}
