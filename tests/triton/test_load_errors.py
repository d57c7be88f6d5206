"""A checkpoint that cannot be served stops the server at load with one line: file and expectation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree.assembly import load_in_process
from ddtree.config import ServingConfig
from ddtree.errors import CheckpointError, ConfigError
from ddtree_local.errors import ServerStartError
from ddtree_local.server import LocalTriton
from tests.fakes.tiny_models import HIDDEN, make_draft
from tests.triton.oracle_server import TinyPair

pytestmark = pytest.mark.triton


@dataclass(frozen=True)
class Broken:
    """Folders to serve, and what the one line must say about them."""

    target: Path
    draft: Path
    says: tuple[str, ...]


def missing_target(pair: TinyPair, folder: Path) -> Broken:
    nowhere = folder / "nowhere"
    return Broken(nowhere, pair.draft, (str(nowhere), "folder"))


def missing_draft_file(pair: TinyPair, _: Path) -> Broken:
    (pair.draft / "model.safetensors").unlink()
    return Broken(pair.target, pair.draft, (f"{pair.draft}/model.safetensors: expected ", "found neither"))


def draft_as_target(pair: TinyPair, _: Path) -> Broken:
    return Broken(pair.draft, pair.draft, (str(pair.draft), "draft", "swapped"))


def draft_of_another_target(pair: TinyPair, folder: Path) -> Broken:
    other = make_draft(folder / "other", hidden=2 * HIDDEN)
    says = (f"{other}/config.json: expected the target's hidden_size {HIDDEN}, found {2 * HIDDEN}",)
    return Broken(pair.target, other, says)


def truncated_target(pair: TinyPair, _: Path) -> Broken:
    truncate(pair.target / "model.safetensors")
    return Broken(pair.target, pair.draft, (f"target: {pair.target}/model.safetensors", "safetensors file"))


def weights_of_another_shape(pair: TinyPair, _: Path) -> Broken:
    config = pair.target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 48}))
    return Broken(pair.target, pair.draft, (f"in {pair.target}", "mlp.down_proj.weight [32, 48] is [32, 64]"))


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


BREAKS = [
    missing_target, missing_draft_file, draft_as_target, draft_of_another_target, truncated_target,
    weights_of_another_shape,
]  # fmt: skip


def start_error(product: Path, broken: Broken, pair: TinyPair, topology: str) -> str:
    """What the failed start of the product's own models says."""
    env = pair.environment(topology) | {
        "DDTREE_TARGET": str(broken.target),
        "DDTREE_DRAFT": str(broken.draft),
    }
    model = "ddtree" if topology == "in_process" else "drafter"  # loading the others only takes time
    with (
        pytest.raises(ServerStartError) as caught,
        LocalTriton(product, load_models=[model], env=env, log_path=pair.target.parent / "triton.log"),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize("broken_by", BREAKS, ids=lambda break_it: break_it.__name__)
def test_whoever_loads_is_told_in_one_line(
    tmp_path: Path, broken_by: Callable[[TinyPair, Path], Broken]
) -> None:
    broken = broken_by(TinyPair.make(tmp_path), tmp_path)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_in_process(
            ServingConfig(broken.target, broken.draft, dtype="float32", device="cpu", kv_cache_mib=4)
        )
    assert "\n" not in str(caught.value)
    for part in broken.says:
        assert part in str(caught.value)


# Refused before anything is read, by a library that reads, and by us after reading.
SERVED = [missing_target, truncated_target, weights_of_another_shape]


@pytest.mark.parametrize("broken_by", SERVED, ids=lambda break_it: break_it.__name__)
def test_in_process(
    project_root: Path, tmp_path: Path, broken_by: Callable[[TinyPair, Path], Broken]
) -> None:
    pair = TinyPair.make(tmp_path)
    broken = broken_by(pair, tmp_path)
    message = start_error(project_root / "model_repository", broken, pair, "in_process")
    assert "\n" not in message
    assert message.startswith("model 'ddtree' did not load: ")
    for part in broken.says:
        assert part in message
    assert "Traceback" not in message


def test_a_stage_of_its_own(project_root: Path, tmp_path: Path) -> None:
    pair = TinyPair.make(tmp_path)
    broken = draft_of_another_target(pair, tmp_path)
    message = start_error(project_root / "model_repository", broken, pair, "bls")
    assert "\n" not in message
    assert message.startswith("model 'drafter' did not load: ")
    for part in broken.says:
        assert part in message
