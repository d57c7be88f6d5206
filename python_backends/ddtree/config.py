"""The deployment's settings: one frozen dataclass, validated where it is built.

Triton hands a model its `parameters` as strings; `${NAME}` and `${NAME:-default}` in them are taken from the
environment, so that one model repository serves any checkpoint. This module reads no checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\}")
_CHOICES = {
    "topology": ("bls", "in_process"),
    "engine": ("torch", "trtllm", "trtllm_chain"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "features_by_reference": ("auto", "always", "never"),
    "trees_built_by": ("tree_builder", "orchestrator"),
    "stage_calls": ("direct", "triton"),
}

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def expand(value: str, environment: Mapping[str, str]) -> str:
    """Replace `${NAME}` and `${NAME:-default}` in a parameter; unset without default becomes empty.

    A default may itself be such a name.
    """

    def replace(match: re.Match[str]) -> str:
        return environment.get(match["name"]) or expand(match["default"] or "", environment)

    return _VARIABLE.sub(replace, value)


@dataclass(frozen=True)
class ServingConfig:
    """Settings of one deployment; every stage reads the part it needs.

    Raises:
        ConfigError: a value breaks its rule; the message names the parameter, the rule and the value.
    """

    target: Path
    draft: Path
    topology: str = "bls"
    # What runs the target. trtllm, and its own chains, trtllm_chain, have not run on the real engine yet.
    engine: str = "torch"
    device: str = "auto"  # auto: CUDA when there is one
    draft_device: str = "target"  # target: the target's device, where embedding and head are shared
    tensor_parallel: int = 1  # processes that share the target, on the GPUs from `device` on
    dtype: str = "auto"  # auto: what the checkpoint says
    threads: int = 0  # CPU threads of a stage; 0: all cores
    kv_cache_mib: int = 512  # bytes of the verifier's pages, projected features included
    draft_kv_cache_mib: int = 128
    state_cache_mib: int = 512  # states of recurrent layers; nothing where the target has none
    page_size: int = 64  # KV slots in a page
    prefill_chunk: int = 128  # prompt tokens the target reads in one call, over all sequences
    max_sequences: int = 32  # sequences decoded at the same time
    max_waiting: int = 256  # sequences that may wait for a place
    queue_timeout_ms: int = 30_000  # how long one may wait for it; 0: as long as it takes
    max_nodes: int = 256  # most draft nodes a request may ask for
    max_step_nodes: int = 512  # most draft nodes verified in one step, over all sequences
    session_ttl_s: int = 600  # a session nobody touched for so long is dropped
    stage_recovery_s: int = 0  # how long a lost verifier is waited for; 0: its sequences end at once
    draft_timeout_ms: int = 5000  # a drafter slower than this is done without
    drain_file: Path | None = None  # while this file is there, new requests are refused
    prefix_cache: bool = True  # prompts that begin alike share pages
    cuda_graphs: bool = True  # on a GPU: kernels of our own, and steps that are captured at load
    features_by_reference: str = "auto"  # whether drafter and verifier share memory; auto: on a GPU
    trees_built_by: str = "tree_builder"  # topology bls: that model, or the orchestrator itself
    stage_calls: str = "direct"  # topology bls: past Triton where a stage offers it; or through triton

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.engine != "torch" and self.topology != "bls":
            raise ConfigError(
                f"topology must be bls with engine {self.engine}, got {self.topology}; it needs a process "
                "of its own, so leave DDTREE_TOPOLOGY unset or set engine to torch"
            )
        if self.engine != "torch" and self.tensor_parallel > 1:
            raise ConfigError(
                f"tensor_parallel must be 1 with engine {self.engine}, got {self.tensor_parallel}; that "
                "engine divides its model itself, so leave DDTREE_TENSOR_PARALLEL unset, or engine at torch"
            )
        for name in ("kv_cache_mib", "draft_kv_cache_mib", "state_cache_mib", "page_size", "prefill_chunk",
                     "max_sequences", "max_nodes", "max_step_nodes", "session_ttl_s",
                     "draft_timeout_ms", "tensor_parallel"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("threads", "max_waiting", "queue_timeout_ms", "stage_recovery_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> ServingConfig:
        """Build from strings; unknown names and values that are no whole numbers are refused.

        Raises:
            ConfigError: the parameter is unknown, missing, or not of its type.
        """
        environment = os.environ if environment is None else environment
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, raw in parameters.items():
            if name not in known:
                raise ConfigError(f"unknown parameter {name!r}; known are {', '.join(sorted(known))}")
            text = expand(raw, environment).strip()
            if not text:
                continue  # unset: the default of the field
            values[name] = _convert(name, text, str(known[name].type))
        for name in ("target", "draft"):
            if name not in values:
                raise ConfigError(
                    f"{name} is not set; name the folder in the parameter or in DDTREE_{name.upper()}"
                )
        return cls(**values)

    @classmethod
    def from_triton(cls, model_config: Mapping[str, Any]) -> ServingConfig:
        """Build from a Triton model configuration (the parsed JSON), see `from_parameters`."""
        parameters = model_config.get("parameters", {})
        return cls.from_parameters({name: entry["string_value"] for name, entry in parameters.items()})


def _convert(name: str, text: str, type_name: str) -> Any:
    if type_name.startswith("Path"):
        return Path(text)
    if type_name == "int":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, got {text!r}") from None
    if type_name == "bool":
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{name} must be true or false, got {text!r}")
        return _BOOLS[text.lower()]
    return text
