"""DFlash 2 against the public `dflash` package: hidden states, logits, and the scores of children."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ddtree.draft import Drafter, DrafterLimits
from ddtree.models.dflash import DFlashDraft
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.tree import build_trees
from ddtree.types import DraftRequest, DraftResult, SessionBatch, TreeRequest
from tests.fakes.dflash_reference import CPU, ReferenceDrafter, max_difference, public_package
from tests.fakes.random_draft import DFLASH2, write_dflash2

VOCABULARY, HIDDEN, BLOCK, TOP_K = 50, 32, 6, DFLASH2["selector_top_k"]


@pytest.fixture(scope="session")
def dflash() -> ModuleType:
    return public_package()


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as published"),
        pytest.param({"is_causal": None}, id="sliding layers causal"),
        pytest.param({"is_causal": None, "layer_types": ["full_attention"] * 3}, id="full, not causal"),
        pytest.param({"dflash_config": {"conv_kernel_size": 4, "conv_group_size": 32}}, id="one group"),
        pytest.param({"dflash_config": {"conv_kernel_size": 1, "conv_group_size": 1}}, id="no row before"),
        pytest.param({"dflash_config": {"conv_kernel_size": 6}}, id="kernel as long as the block"),
        pytest.param({"output_multiplier": 0.7, "final_logit_softcapping": 3.0}, id="scaled and capped"),
    ],
)  # fmt: skip
def test_hidden_states_and_logits_equal_the_public_package(
    dflash: ModuleType, tmp_path: Path, changes: dict[str, Any], num_sequences: int
) -> None:
    torch.manual_seed(0)
    assert max_difference(dflash, write_dflash2(tmp_path, **changes), num_sequences) <= 1e-4


class Pair:
    """Our drafter stage and one public model per sequence, with the same embedding and head."""

    def __init__(self, dflash: ModuleType, folder: Path, num_sequences: int) -> None:
        torch.manual_seed(3)
        checkpoint = open_checkpoint(folder)
        self.embedding = torch.randn(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight.data *= (
            4  # unary scores that the pairs can overturn, and that can overturn the pairs
        )
        limits = DrafterLimits(1 << 20, page_size=16, session_ttl_s=600)
        model = DFlashDraft.load(checkpoint, torch.float32, CPU)
        self.drafter = Drafter(model, limits, embedding=self.embedding, head=self.head, draft_hash="two")
        self.references = [ReferenceDrafter(dflash, folder) for _ in range(num_sequences)]
        self.mask_id = checkpoint.config.mask_token_id
        self.lengths = [0] * num_sequences

    def draft(self, taps: list[torch.Tensor], roots: list[int], width: int = 3) -> DraftResult:
        counts, size = [len(rows) for rows in taps], len(taps)
        projection = self.references[0].model
        features = projection.hidden_norm(projection.fc(torch.cat(taps)))
        request = DraftRequest(
            SessionBatch(
                torch.arange(size), torch.zeros(size, dtype=torch.int32), torch.tensor(self.lengths).int()
            ),
            torch.zeros(sum(counts), dtype=torch.int32), features, torch.tensor(counts).int(),
            torch.tensor(roots).int(), torch.full((size,), 100).int(), depth=BLOCK - 1, width=width,
        )  # fmt: skip
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return self.drafter.draft(request)

    def propose(self, index: int, taps: torch.Tensor, root: int, temperature: float) -> Any:
        """The public model's path, candidates and distributions along the path."""
        block = torch.tensor([root, *[self.mask_id] * (BLOCK - 1)])
        reference = self.references[index]
        hidden = reference.step(taps, self.embedding[block])[None, 1:]
        return reference.model.propose(hidden, torch.tensor([root]), self.head, temperature)


def chain_of(result: DraftResult) -> list[list[int]]:
    size = len(result.status)
    request = TreeRequest(
        result.top_ids, result.top_log_probs, torch.full((size,), BLOCK).int(), torch.ones(size).bool(),
        torch.zeros(0), result.edge_log_probs,
    )  # fmt: skip
    return build_trees(request).tokens.tolist()


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_greedy_chain_is_the_public_packages_proposal(
    dflash: ModuleType, tmp_path: Path, num_sequences: int
) -> None:
    pair = Pair(dflash, write_dflash2(tmp_path, seed=4), num_sequences)
    generator = torch.Generator().manual_seed(1)
    overturned = 0
    with torch.inference_mode():
        for step in range(4):
            counts = [
                (1 + 7 * index if step == 0 else 1 + (index + step) % 3) for index in range(num_sequences)
            ]
            taps = [torch.randn(count, 3 * HIDDEN, generator=generator) for count in counts]
            roots = torch.randint(0, 48, (num_sequences,), generator=generator).tolist()
            result = pair.draft(taps, roots)
            assert result.top_ids.shape == (num_sequences, BLOCK - 1, TOP_K)
            assert result.edge_log_probs.shape == (num_sequences, BLOCK - 1, TOP_K, TOP_K)
            chains = chain_of(result)
            for index in range(num_sequences):
                path, _, _ = pair.propose(index, taps[index], roots[index], 0.0)
                assert chains[index] == path[0].tolist()
                overturned += chains[index] != result.top_ids[index, :, 0].tolist()
    assert overturned, "the scores given the parent never mattered: the case shows nothing"


def test_edges_are_the_public_packages_distributions(dflash: ModuleType, tmp_path: Path) -> None:
    """At temperature 1 the package draws from its distribution given the drawn parent, and tells it."""
    pair = Pair(dflash, write_dflash2(tmp_path, seed=4), 1)
    with torch.inference_mode():
        for step in range(12):
            taps = torch.randn(2, 3 * HIDDEN)
            result = pair.draft([taps], [step])
            torch.manual_seed(step)
            path, candidates, distributions = pair.propose(0, taps, step, 1.0)
            ids, parent = result.top_ids[0].tolist(), 0
            for depth in range(BLOCK - 1):
                given = dict(
                    zip(candidates[0, depth].tolist(), distributions[0, depth].tolist(), strict=True)
                )
                ours = result.edge_log_probs[0, depth, parent].exp().tolist()
                assert set(given) == set(ids[depth])
                for token, share in zip(ids[depth], ours, strict=True):
                    assert share == pytest.approx(given[token], abs=1e-5)
                parent = ids[depth].index(int(path[0, depth]))


def test_the_width_asked_for_does_not_change_a_selectors_candidates(
    dflash: ModuleType, tmp_path: Path
) -> None:
    folder = write_dflash2(tmp_path)
    taps = [torch.randn(5, 3 * HIDDEN)]
    with torch.inference_mode():
        results = [Pair(dflash, folder, 1).draft(taps, [7], width=width) for width in (1, 40)]
    assert torch.equal(results[0].edge_log_probs, results[1].edge_log_probs)
    assert torch.allclose(results[0].edge_log_probs.exp().sum(-1), torch.ones(1))


def test_a_lost_sequence_has_no_candidates_and_context_alone_gives_none(
    dflash: ModuleType, tmp_path: Path
) -> None:
    pair = Pair(dflash, write_dflash2(tmp_path), 2)
    taps = [torch.randn(3, 3 * HIDDEN)] * 2
    with torch.inference_mode():
        pair.lengths = [0, 5]  # nobody opened the second
        result = pair.draft(taps, [1, 2])
    assert result.status.tolist() == [0, 1]
    assert chain_of(result)[1] == [0] * (BLOCK - 1)
    assert result.select(torch.tensor([0])).edge_log_probs.shape == (1, BLOCK - 1, TOP_K, TOP_K)
