"""Hopper's own tree attention against the obvious answer, in memory poisoned wherever nothing may be read.

Without such a GPU the kernels' code runs on threads, see `tests.fakes.hopper_threads`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ddtree.device.kernels import attention_hopper, attention_hopper_blocks
from ddtree.device.kernels.attention import Scoring
from ddtree.device.kernels.attention_hopper import attend_in_teams, is_hopper
from ddtree.device.kernels.attention_tiling import AttentionShape, TeamTiling, teams_for
from ddtree.device.rows import Sight
from tests.fakes.attention_cases import Case, Form, expected, make_case
from tests.fakes.hopper_threads import HopperThreads

FORM = Form(rows=65, groups=4, kv_heads=2, head_dim=32, page_size=64, scoring=Scoring(0.3))
CUTS = {
    "blocks of two pages": TeamTiling(many=3, last=2, keys=128, stages=2),
    "blocks of one": TeamTiling(many=2, last=4, keys=64, stages=3),
}


@pytest.fixture(autouse=True)
def on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_hopper():
        threads = HopperThreads("_parts_kernel", [attention_hopper_blocks, attention_hopper])
        monkeypatch.setattr(attention_hopper, "_parts_kernel", threads)


def attend(case: Case, cut: TeamTiling) -> torch.Tensor:
    """What the parts say together, float64."""
    form, (keys, values) = case.form, case.pool
    scale = form.scoring.scaling * math.log2(math.e)
    parts = attend_in_teams(
        case.query, case.keys, case.values, keys, values, case.rows, form.sight, scale, cut
    )
    found = torch.zeros(case.query.shape, dtype=torch.float64)
    for place, count in enumerate(case.rows.counts.tolist()):
        sums, means = parts.sums[place, :count].cpu().double(), parts.means[place, :count].cpu().double()
        shares = torch.softmax(sums * math.log(2), dim=-1)[..., None]
        found[place, :count] = torch.where(shares > 0, means * shares, 0.0).sum(2)
    return found


def check(form: Form, lengths: list[int], counts: list[int], cut: TeamTiling) -> None:
    if is_hopper():
        form = replace(form, dtype=torch.bfloat16, head_dim=128, scoring=Scoring(0.1))
    case = make_case(form, lengths, counts, seed=form.rows)
    close = 1.6e-2 if is_hopper() else 1e-5
    torch.testing.assert_close(attend(case, cut), expected(case), rtol=0, atol=close)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(
    ("lengths", "counts"), [([1000, 0], [65, 40]), ([640, 20], [64, 33]), ([511, 64], [1, 0])]
)
def test_trees(name: str, lengths: list[int], counts: list[int]) -> None:
    """Full blocks and what is left of them, none, places without rows, and tiles that counts do not reach."""
    check(FORM, lengths, counts, CUTS[name])


@pytest.mark.parametrize("name", CUTS)
def test_chains_of_one_tile(name: str) -> None:
    check(replace(FORM, rows=17, groups=2, sight=Sight.CAUSAL), [700], [16], replace(CUTS[name], many=1))


def test_blocks_of_half_a_page() -> None:
    check(replace(FORM, rows=33, page_size=256), [700], [33], CUTS["blocks of two pages"])


def test_a_tree_of_two_words() -> None:
    check(replace(FORM, rows=97, groups=2, kv_heads=1), [130], [97], CUTS["blocks of two pages"])


def test_teams_are_for_many_rows_behind_long_contexts() -> None:
    shape = AttentionShape(places=1, rows=65, heads=32, kv_heads=8, head_dim=128, slots=16512, item_bytes=2)
    cut = teams_for(shape)
    assert cut is not None
    assert 8 * (2 * cut.many + cut.last) <= 132, "one wave"
    assert cut.many > cut.last, "the last tile has four of its 128 rows"
    assert teams_for(replace(shape, slots=2048)) is None
    assert teams_for(replace(shape, rows=16)) is None
