"""What a stage in a process of its own can be asked: operations by name, named arrays in, named arrays out.

Every operation is `message in, message out`; the codec is `ddtree.wire`. Context features are answered by
reference to a caller who says that it takes references, and are taken either way. This module knows no
model, and not how a call arrives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

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

Operation = Callable[[Mapping[str, Any]], Arrays]


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

    def operation(_: Mapping[str, Any]) -> Arrays:
        told = {**asdict(info()), "shares": shares}
        return {"info": np.array([json.dumps(told).encode()], dtype=np.object_)}

    return operation


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
