"""Settings from Triton's parameters: expansion, and one line for whatever is wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from ddtree.config import ServingConfig, expand
from ddtree.errors import ConfigError

FOLDERS = {"target": "/models/target", "draft": "/models/draft"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("${A}", "one"),
        ("${A:-other}", "one"),
        ("${MISSING:-other}", "other"),
        ("${MISSING:-}", ""),
        ("${MISSING}", ""),
        ("${EMPTY:-other}", "other"),  # as in a shell: empty counts as unset
        ("/x/${A}/${B}/${MISSING:-y}", "/x/one/2/y"),
        ("$A and {A}", "$A and {A}"),
        ("${MISSING:-/a b:c-d}", "/a b:c-d"),
        ("${1A}", "${1A}"),
        ("${A:-${B}}", "one"),
        ("${MISSING:-${B:-z}}/${MISSING:-${NEITHER:-z}}", "2/z"),
        ("${LOOP}", "x${LOOP}"),  # what the environment says is taken as it is
    ],
)
def test_expand(text: str, expanded: str) -> None:
    assert expand(text, {"A": "one", "B": "2", "EMPTY": "", "LOOP": "x${LOOP}"}) == expanded


def test_unset_parameters_leave_the_defaults() -> None:
    unset = {name: f"${{DDTREE_{name.upper()}}}" for name in ("topology", "threads", "max_nodes", "dtype")}
    config = ServingConfig.from_parameters({**FOLDERS, **unset}, {})
    assert config == ServingConfig(Path("/models/target"), Path("/models/draft"))


def test_values_come_from_the_environment_and_get_their_types() -> None:
    parameters = {
        "target": "${T}",
        "draft": "${D:-/d}",
        "kv_cache_mib": " ${K} ",
        "topology": "${O:-in_process}",
    }
    config = ServingConfig.from_parameters(parameters, {"T": "/t", "K": "64"})
    assert (config.target, config.draft, config.kv_cache_mib, config.topology) == (
        Path("/t"), Path("/d"), 64, "in_process",
    )  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [("false", False), ("0", False), ("True", True), ("1", True)])
def test_switches_are_said_in_words_or_digits(text: str, value: bool) -> None:
    parameters = {**FOLDERS, "prefix_cache": "${DDTREE_PREFIX_CACHE}"}
    assert ServingConfig.from_parameters(parameters, {"DDTREE_PREFIX_CACHE": text}).prefix_cache is value
    assert ServingConfig.from_parameters(parameters, {}).prefix_cache is True


def test_the_servers_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_TARGET", "/t")
    assert ServingConfig.from_parameters({"target": "${DDTREE_TARGET}", "draft": "/d"}).target == Path("/t")


def test_from_a_triton_configuration() -> None:
    model_config = {"parameters": {name: {"string_value": value} for name, value in FOLDERS.items()}}
    assert ServingConfig.from_triton(model_config).draft == Path("/models/draft")
    with pytest.raises(ConfigError, match="target is not set"):
        ServingConfig.from_triton({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_node": "5"}, "unknown parameter 'max_node'; known are .*max_nodes"),
        ({"max_nodes": "many"}, "max_nodes must be a whole number, got 'many'"),
        ({"max_nodes": "1.5"}, "max_nodes must be a whole number, got '1.5'"),
        ({"max_nodes": "0"}, "max_nodes must be at least 1, got 0"),
        ({"kv_cache_mib": "-3"}, "kv_cache_mib must be at least 1, got -3"),
        ({"draft_kv_cache_mib": "0"}, "draft_kv_cache_mib must be at least 1"),
        ({"page_size": "0"}, "page_size must be at least 1"),
        ({"prefill_chunk": "0"}, "prefill_chunk must be at least 1"),
        ({"max_sequences": "0"}, "max_sequences must be at least 1"),
        ({"session_ttl_s": "0"}, "session_ttl_s must be at least 1"),
        ({"threads": "-1"}, "threads must not be negative, got -1"),
        ({"max_waiting": "-1"}, "max_waiting must not be negative, got -1"),
        ({"queue_timeout_ms": "-1"}, "queue_timeout_ms must not be negative, got -1"),
        ({"max_step_nodes": "0"}, "max_step_nodes must be at least 1, got 0"),
        ({"topology": "ensemble"}, "topology must be one of bls, in_process, got 'ensemble'"),
        ({"prefix_cache": "maybe"}, "prefix_cache must be true or false, got 'maybe'"),
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16, float16, float32, got 'int8'"),
        ({"target": ""}, "target is not set; .*DDTREE_TARGET"),
        ({"draft": "${NOTHING}"}, "draft is not set; .*DDTREE_DRAFT"),
    ],
)
def test_what_breaks_a_rule_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ServingConfig.from_parameters({**FOLDERS, **changes}, {})
    assert "\n" not in str(caught.value)


def test_it_cannot_be_changed() -> None:
    config: Any = ServingConfig.from_parameters(FOLDERS, {})
    with pytest.raises(FrozenInstanceError):
        config.max_nodes = 5


def test_every_parameter_of_the_model_repository_is_known(project_root: Path) -> None:
    configurations = sorted((project_root / "model_repository").glob("*/config.pbtxt"))
    assert len(configurations) >= 4
    known = ServingConfig.__dataclass_fields__.keys()
    for path in configurations:
        text = path.read_text()
        names = {part.split('"')[1] for part in text.split("key:")[1:]}
        assert names <= known, path
