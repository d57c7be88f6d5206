"""What a stage in a process of its own can be asked: operations by name, named arrays in, named arrays out.

Every operation is `message in, message out`; the codec is `ddtree.wire`. Context features are answered by
reference to a caller who says that it takes references, and are taken either way. This module knows no
model, and not how a call arrives.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddtree.errors import DDTreeError
from ddtree.types import (
    DraftRequest,
    DraftResult,
    FeatureProbe,
    FeatureRequest,
    PrefillRequest,
    VerifyRequest,
)
from ddtree.wire import Arrays, decode, encode

if TYPE_CHECKING:
    from ddtree.feature_references import DrafterReferences, VerifierReferences

_LOG = logging.getLogger(__name__)

Operation = Callable[[Mapping[str, Any]], Arrays]


class CallFailed(Exception):
    """What the caller of a stage is told instead of an answer."""


def perform(operations: Mapping[str, Operation], name: str, arrays: Arrays) -> Arrays:
    """Run one operation; beside its outputs stands what it took.

    Raises:
        CallFailed: whatever went wrong; the stage outlives it.
    """
    try:
        started = time.perf_counter()
        with torch.inference_mode():
            outputs = operations[name](arrays)
        # What is left of the caller's round trip is the hop.
        outputs["stage_ms"] = np.array([(time.perf_counter() - started) * 1e3], dtype=np.float32)
    except DDTreeError as error:
        raise CallFailed(str(error)) from error
    except KeyError as error:
        known = ", ".join(sorted(operations))
        message = f"INVALID_ARGUMENT: no operation or input {error}; operations are {known}"
        raise CallFailed(message) from error
    except Exception as error:
        _LOG.exception("a call failed: %s", error, extra={"operation": name})
        raise CallFailed(f"INTERNAL: {error}") from error
    return outputs


def exchange(
    call: Callable[[Any], Any],
    message_type: type,
    feature_dtype: torch.dtype,
    refer: Callable[[Any, Any], Any] | None = None,
) -> Operation:
    """One operation; `refer` puts references in the place of features for a caller who takes them."""

    def operation(arrays: Mapping[str, Any]) -> Arrays:
        request: Any = decode(message_type, arrays, feature_dtype)
        answer = call(request)
        if refer is not None and "by_reference" in arrays:
            answer = refer(request, answer)
        return encode(answer)

    return operation


def describe(info: Callable[[], Any], shares: str = "") -> Operation:
    """Tell what a stage is, and the memory it shares."""
    return lambda _: told({**asdict(info()), "shares": shares})


def told(values: Mapping[str, Any]) -> Arrays:
    """An answer of values, as JSON."""
    return {"info": np.array([json.dumps(values).encode()], dtype=np.object_)}


def release(stage: Any) -> Operation:
    """Drop sessions; tell how many, and pages, are left."""

    def operation(arrays: Mapping[str, Any]) -> Arrays:
        usage = stage.release(arrays["session_ids"].tolist())
        return {"status": np.array([usage.sessions, usage.pages_used], dtype=np.int32)}

    return operation


def verifier_operations(verifier: Any, refers: VerifierReferences) -> dict[str, Operation]:
    """Of a verifier, ours or an engine's."""
    dtype = verifier.feature_dtype
    return {
        "describe": describe(verifier.info, refers.place),
        "probe": lambda arrays: encode(refers.probe(by_reference="by_reference" in arrays)),
        "release": release(verifier),
        "prefill": exchange(verifier.prefill, PrefillRequest, dtype, refers.prefilled),
        "verify": exchange(verifier.verify, VerifyRequest, dtype, refers.verified),
        "read_features": exchange(verifier.read_features, FeatureRequest, dtype, refers.read),
    }


def drafter_operations(drafter: Any, refers: DrafterReferences) -> dict[str, Operation]:
    """Of a drafter: the DFlash one, or any other that proposes candidates."""
    dtype = drafter.feature_dtype

    def draft(request: DraftRequest) -> DraftResult:
        result: DraftResult = drafter.draft(refers.resolved(request))
        return result

    return {
        "describe": describe(drafter.info, refers.place),
        "probe": exchange(refers.probe, FeatureProbe, dtype),
        "release": release(drafter),
        "draft": exchange(draft, DraftRequest, dtype),
    }
