"""The check of trees at load: it passes where all is right and refuses what would let wrong tokens by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.trtllm import masks
from ddtree.trtllm.check import check_trees, refuse_wrong_trees
from ddtree.trtllm.contract import Contract, load_contracts
from ddtree.trtllm.library import EngineUnfit
from tests.fakes.tiny_models import make_target
from tests.fakes.trtllm_library import FakeLibrary
from tests.fakes.trtllm_pipeline import load, pool_of, verifier_over

CONTRACTS = {contract.name: contract for contract in load_contracts()}
NEWEST = load_contracts()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS.keys())
def test_the_check_at_load_passes_where_all_is_right(folder: Path, contract: Contract) -> None:
    target = load(folder, FakeLibrary(contract))
    check = check_trees(target, pool_of(verifier_over(target)))
    assert check.is_right
    assert max(check.logits_worst, check.taps_median, check.relocated_median) < 1e-4


def off_by_flat_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(segments: Any, width: int) -> Any:
        trees = masks.pack(segments, width)
        return replace(trees, offsets=torch.arange(width, dtype=torch.int32).expand_as(trees.offsets))

    monkeypatch.setattr("ddtree.trtllm.target.pack", pack)


def bits_turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(segments: Any, width: int) -> Any:
        trees = masks.pack(segments, width)
        lowest = trees.mask & 1
        return replace(trees, mask=(trees.mask >> 1 & 0x7FFFFFFF) | lowest << 31)

    monkeypatch.setattr("ddtree.trtllm.target.pack", pack)


def rows_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.trtllm.pool.EnginePool.move", lambda *_: None)


def indices_count_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.trtllm.adapter.draft_indices", lambda path: tuple(path[1:]))


@pytest.mark.parametrize(
    "fault", [off_by_flat_index, bits_turned_round, rows_not_moved, indices_count_the_root]
)
def test_the_check_at_load_refuses_trees_that_are_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    target = load(folder, FakeLibrary(NEWEST))
    pool = pool_of(verifier_over(target))
    fault(monkeypatch)
    with pytest.raises(EngineUnfit, match=r"trees are verified wrongly|a tree step failed"):
        refuse_wrong_trees(target, pool)
    assert pool.pages_used == 0


def test_a_gpu_without_tree_attention_is_refused(folder: Path) -> None:
    target = load(folder, FakeLibrary(NEWEST, has_tree_attention=False))
    with pytest.raises(EngineUnfit, match="no tree attention for this GPU"):
        refuse_wrong_trees(target, pool_of(verifier_over(target)))
