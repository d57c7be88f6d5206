"""What a server says about itself: alive, ready, models, and what the stage models hold.

Requests and readings only; the clients do the calls. Stage models are optional: with the in-process topology
there are none, and a server of another kind is described as far as it answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import InferResult

from ddtree_client.errors import DDTreeClientError
from ddtree_client.wire import build_bytes_request

STAGE_MODELS = ("target_verifier", "drafter")
KNOWN_MODELS = ("drafter", "target_verifier", "tree_builder")


@dataclass(frozen=True)
class ModelHealth:
    """One model of the server's repository. ``reason`` says why it is not ready, when the server knows."""

    name: str
    version: str
    ready: bool
    state: str
    reason: str


@dataclass(frozen=True)
class Health:
    """A server's answer to "how are you".

    ``stages`` maps a stage model to what its ``describe`` operation returned.
    """

    address: str
    live: bool
    ready: bool
    server_version: str
    models: tuple[ModelHealth, ...]
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def model_ready(self, name: str) -> bool:
        """Whether the model ``name`` is loaded and ready."""
        return any(model.ready for model in self.models if model.name == name)


def read_index(index: Any) -> tuple[ModelHealth, ...]:
    """The models of a ``RepositoryIndexResponse``, by name."""
    models = (
        ModelHealth(
            entry.name, entry.version, entry.state == "READY", entry.state or "NOT LOADED", entry.reason
        )
        for entry in index.models
    )
    return tuple(sorted(models, key=lambda model: model.name))


def is_closed(error: DDTreeClientError) -> bool:
    """Whether a call was refused because it is for operators, who have a key."""
    return "protocol is restricted" in error.message


def seen_ready(ready: Mapping[str, bool]) -> tuple[ModelHealth, ...]:
    """The known models of a server that lists none, by what it says of each."""
    return tuple(
        ModelHealth(name, "", is_ready, "READY" if is_ready else "NOT READY", "")
        for name, is_ready in sorted(ready.items())
    )


def describe_request(model: str) -> Any:
    """The request that a stage model answers with a JSON description."""
    return build_bytes_request(model=model, name="op", value=b"describe")


def read_description(response: Any) -> Mapping[str, Any]:
    """The JSON object in the first BYTES output that holds one; empty when there is none."""
    result = InferResult(response)
    for output in response.outputs:
        if output.datatype != "BYTES":
            continue
        for value in result.as_numpy(output.name).reshape(-1):
            try:
                description = json.loads(value)
            except ValueError:
                continue
            if isinstance(description, dict):
                return description
    return {}
