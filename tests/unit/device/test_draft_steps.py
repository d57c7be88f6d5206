"""A drafter that answers through captured passes against the same drafter without, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddtree.device.buffers import CacheSize
from ddtree.device.draft_steps import DraftSteps
from ddtree.device.drafting import DeviceCandidates, DeviceDraft
from ddtree.device.graphs import GraphMaker
from ddtree.device.kernels.top import top_by_torch
from ddtree.draft import Drafter, DrafterLimits
from ddtree.errors import InvalidArgument
from ddtree.models.dflash import DFlashDraft
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.types import DraftRequest, DraftResult, SessionBatch, Status
from tests.fakes.device import DEVICE
from tests.fakes.device_draft import BLOCK, HIDDEN, PAGE, VOCABULARY, small, small_dflash2, small_speculators

TEXT = 24  # tokens of context that there are, the same for every session
RESERVED = 32
Folder = Callable[[Path], Path]


def one_layer(folder: Path) -> Path:
    return small(folder, num_hidden_layers=1, layer_types=None)


def build(folder: Path) -> Drafter:
    torch.manual_seed(5)
    checkpoint = open_checkpoint(folder)
    count = min(checkpoint.config.draft_vocab_size, VOCABULARY)
    return Drafter(
        DFlashDraft.load(checkpoint, torch.float32, DEVICE),
        DrafterLimits(1 << 20, page_size=PAGE, session_ttl_s=600, prefix_cache=False),
        embedding=torch.randn(VOCABULARY, HIDDEN).to(DEVICE),
        head=nn.Linear(HIDDEN, count, bias=False).to(DEVICE),
        draft_hash="one",
        target_ids=None if count == VOCABULARY else torch.randperm(VOCABULARY)[:count].to(DEVICE),
    )


class Both:
    """The two drafters, asked the same; what they say must agree."""

    def __init__(self, folder: Path, places: Sequence[int] = (1, 2), width: int = 4) -> None:
        self.plain, self.prepared = build(folder), build(folder)
        pool = self.prepared.pool
        parts = (self.prepared.model, self.prepared._embedding, self.prepared._head)
        draft = DeviceDraft(*parts, self.prepared._target_ids, pool, top=top_by_torch)
        cache, maker = CacheSize(pool.num_pages, PAGE), GraphMaker(DEVICE)
        self.steps = DraftSteps(draft, places, cache, block_size=BLOCK, width=width, maker=maker)
        self.prepared._steps = self.steps
        self.features = torch.randn(TEXT, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def ask(
        self, sessions: Sequence[int], starts: Sequence[int], stops: Sequence[int], width: int = 4
    ) -> DraftResult:
        """Sessions that have the text up to `starts` get it up to `stops`, and draft."""
        request = self.request(sessions, starts, stops, width)
        wanted, found = self.plain.draft(request), self.prepared.draft(request)
        assert found.status.tolist() == wanted.status.tolist()
        assert found.top_ids.tolist() == wanted.top_ids.tolist()
        for ours, theirs in (
            (found.top_log_probs, wanted.top_log_probs),
            (found.edge_log_probs, wanted.edge_log_probs),
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        return found

    def request(
        self, sessions: Sequence[int], starts: Sequence[int], stops: Sequence[int], width: int = 4
    ) -> DraftRequest:
        spans = [range(*span) for span in zip(starts, stops, strict=True)]
        ids = torch.tensor([at for span in spans for at in span])
        zeros = torch.zeros(len(sessions), dtype=torch.int32)
        return DraftRequest(
            SessionBatch(torch.tensor(sessions), zeros, torch.tensor(starts).int()), ids.int(),
            self.features[ids.long()], torch.tensor([len(span) for span in spans]).int(),
            torch.arange(len(sessions)).int() + 3, zeros + RESERVED, depth=BLOCK - 2, width=width,
        )  # fmt: skip

    def kept(self, session: int, length: int) -> torch.Tensor:
        """What the prepared drafter's cache has of a session."""
        found = self.prepared.sessions.find(session, 0, length)
        assert found is not None
        return self.prepared.pool.keys_values[:, :, found.pages.slots[:length]].clone()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each pass how much new context it brought."""
    brought: list[int] = []
    candidates = DraftSteps.candidates

    def noted(steps: DraftSteps, *arguments: Any) -> DeviceCandidates:
        brought.append(sum(arguments[2].counts))
        return candidates(steps, *arguments)

    monkeypatch.setattr(DraftSteps, "candidates", noted)
    return brought


@pytest.mark.parametrize("folder", [one_layer, small_dflash2, small_speculators])
def test_candidates_and_edges(tmp_path: Path, passed: list[int], folder: Folder) -> None:
    """In the first places of a batch, at the depth and width asked for; of DFlash 2 with edges."""
    both = Both(folder(tmp_path))
    found = both.ask([1, 2], [0, 0], [3, BLOCK])
    assert (found.edge_log_probs.numel() > 0) == (folder is small_dflash2)
    assert passed == [3 + BLOCK]


def test_calls_that_no_pass_does(tmp_path: Path, passed: list[int]) -> None:
    """More sequences than places, more candidates than passes pick."""
    both = Both(one_layer(tmp_path))
    both.ask([2, 3, 4], [0, 0, 0], [1, 2, 3])
    both.ask([3], [2], [3], width=5)
    assert passed == []
    both.ask([2, 3], [1, 3], [1, 4])
    assert passed == [1]


def test_more_context_than_a_block_is_written_before_the_pass(tmp_path: Path, passed: list[int]) -> None:
    """A prompt's last chunk comes with its first draft, perhaps beside one that is drafting already."""
    both = Both(one_layer(tmp_path))
    both.ask([1], [0], [BLOCK + 1])
    both.ask([1, 2], [BLOCK + 1, 0], [BLOCK + 3, 2 * BLOCK])
    assert passed == [0, 0]


def test_context_beyond_a_sessions_pages_is_refused(tmp_path: Path, passed: list[int]) -> None:
    both = Both(one_layer(tmp_path))
    few = torch.tensor([PAGE])
    both.prepared.draft(replace(both.request([1], [0], [3]), reserve=few, depth=0))
    with pytest.raises(AssertionError, match="overruns the session's pages"):
        both.prepared.draft(both.request([1], [3], [PAGE + 1]))
    assert passed == []


def test_counts_that_do_not_divide_the_context_are_refused(tmp_path: Path, passed: list[int]) -> None:
    both = Both(one_layer(tmp_path))
    request = both.request([1], [0], [3])
    for features in (request.context_features[:1], both.features[:5]):
        with pytest.raises(
            InvalidArgument, match="counts must be 0 or more each and add up to 3 context_ids"
        ):
            both.prepared.draft(replace(request, context_features=features))
    with pytest.raises(AssertionError, match="features are rows"):
        both.prepared.draft(replace(request, context_features=request.context_features[:, :1]))
    assert len(passed) == 1


def test_context_in_pieces_is_context_at_once(tmp_path: Path, passed: list[int]) -> None:
    """Lost sessions are skipped, and a place that is empty in one pass leaves its old pages alone."""
    both = Both(one_layer(tmp_path), places=(3,))
    drafter, total = both.prepared, 2 * BLOCK + 1

    def write(session: int) -> None:
        drafter.draft(replace(both.request([session], [0], [total]), depth=0))

    write(1)
    expected = both.kept(1, total)
    assert expected.abs().sum() > 0
    drafter.release([1])
    drafter.draft(both.request([2, 3, 5], [0] * 3, [3, BLOCK, 1]))
    drafter.release([5])
    write(6)  # has the pages that 5 had
    for step in both.steps._steps:
        step.features.fill_(9.0)  # whatever stood there
    lost = drafter.draft(both.request([7, 2, 3], [5, 3, BLOCK], [6, 5, BLOCK]))
    assert lost.status.tolist() == [Status.SESSION_LOST, 0, 0]
    assert passed == [4 + BLOCK, 2]
    for session, length in ((2, 5), (3, BLOCK), (6, total)):
        torch.testing.assert_close(both.kept(session, length), expected[:, :, :length])
