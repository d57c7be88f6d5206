"""Cached prefixes in the real stages: what is reused, what runs, and that a hit's cache is a miss's cache."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddtree.attention.plan import StepPlan
from ddtree.models.target import TargetStep
from ddtree.prefix_cache import PageKeys
from ddtree.types import (
    Beginnings,
    PrefillRequest,
    PrefillResult,
    SessionBatch,
    Status,
    TreeBatch,
    VerifyRequest,
)
from ddtree.verify import TargetVerifier
from tests.fakes.pipeline import make_verifier
from tests.fakes.target_families import make_family
from tests.fakes.tiny_models import VOCAB_SIZE, make_target

PAGE = 16
_session_ids = itertools.count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def some_ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(count)]


class Caller:
    """Talks to a verifier as the engine does, and keeps track of the committed length."""

    def __init__(
        self, verifier: TargetVerifier, ids: Sequence[int], *, salt: str = "", sampling: str = ""
    ) -> None:
        self.verifier, self.ids, self.salt, self.sampling = verifier, list(ids), salt, sampling
        self.session, self.length, self.reused = next(_session_ids), 0, 0

    def prefill(self, count: int = 512) -> PrefillResult:
        begins = not self.length
        chunk = self.ids[self.length : self.length + count]
        result = self.verifier.prefill(
            PrefillRequest(
                self.row,
                ints(*chunk),
                ints(len(chunk)),
                ints(len(self.ids) + 64),
                (self.sampling,),
                Beginnings(ints(*self.ids * begins), ints(len(self.ids) * begins), (self.salt,)),
            )
        )
        assert result.status.tolist() == [Status.OK]
        self.reused += int(result.reused[0])
        self.length += int(result.reused[0]) + len(result.features)
        self.verifier.check_integrity()
        return result

    @property
    def row(self) -> SessionBatch:
        return SessionBatch(torch.tensor([self.session]), ints(0), ints(self.length))

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.verifier.sessions.find(self.session, 0, self.length)
        assert found is not None
        slots = found.pages.slots[: self.length]
        return self.verifier.pool.keys_values[:, :, slots], self.verifier.pool.features[slots]

    def end(self) -> None:
        self.verifier.release([self.session])
        self.verifier.check_integrity()


class CountedTarget:
    """Counts the rows that run through a verifier's target."""

    def __init__(self, verifier: TargetVerifier) -> None:
        self.rows = 0
        self._forward = verifier.target.forward
        verifier.target.forward = self.forward  # type: ignore[method-assign]

    def forward(self, token_ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> TargetStep:
        self.rows += len(token_ids)
        return self._forward(token_ids, plan, keep)


@pytest.mark.parametrize("family", ["llama", "qwen3, sliding", "gemma3", "gpt-oss"])
def test_a_hits_cache_and_token_are_those_of_a_miss(tmp_path: Path, family: str) -> None:
    """Prompts whose cached part ends around page boundaries; the windows of 8 end within a page."""
    folder = make_family(tmp_path, family)
    verifier, fresh = make_verifier(folder), make_verifier(folder)
    base = some_ids(3 * PAGE)
    Caller(verifier, base).prefill()
    for shared in (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE):
        prompt = [*base[:shared], *some_ids(9, seed=shared)]
        hit, miss = Caller(verifier, prompt), Caller(fresh, prompt, salt=str(shared))
        expected, got = miss.prefill(), hit.prefill()
        assert (miss.reused, hit.reused) == (0, shared // PAGE * PAGE)
        assert got.next_tokens.tolist() == expected.next_tokens.tolist()
        for ours, theirs in zip(hit.cache(), miss.cache(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)
        assert torch.allclose(got.features, expected.features[hit.reused :], atol=1e-4)


@pytest.mark.parametrize(
    ("length", "reused"),
    [(PAGE - 1, 0), (PAGE, 0), (PAGE + 1, PAGE), (2 * PAGE, PAGE), (2 * PAGE + 1, 2 * PAGE)],
)
def test_the_same_prompt_again_runs_only_what_no_full_page_holds(
    folder: Path, length: int, reused: int
) -> None:
    """The last token always runs: what comes after it is wanted."""
    verifier = make_verifier(folder)
    prompt = some_ids(length)
    first = Caller(verifier, prompt)
    token = first.prefill().next_tokens.tolist()
    first.end()
    assert verifier.pool.pages_cached == length // PAGE
    counted = CountedTarget(verifier)
    again = Caller(verifier, prompt)
    assert again.prefill().next_tokens.tolist() == token
    assert (again.reused, counted.rows) == (reused, length - reused)


def test_who_brings_no_ids_shares_nothing(folder: Path) -> None:
    verifier = make_verifier(folder)
    prompt = some_ids(40)
    Caller(verifier, prompt).prefill()
    request = PrefillRequest(
        SessionBatch(torch.tensor([5]), ints(0), ints(0)), ints(*prompt), ints(40), ints(60)
    )
    assert verifier.prefill(request).reused.tolist() == [0]
    assert len(verifier.prefill(request).features) == 40


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("", "b"), ("a", "")])
def test_different_salts_share_nothing(folder: Path, first: str, second: str) -> None:
    verifier = make_verifier(folder)
    prompt = some_ids(40)
    Caller(verifier, prompt, salt=first).prefill()
    other, same = Caller(verifier, prompt, salt=second), Caller(verifier, prompt, salt=first)
    other.prefill()
    same.prefill()
    assert (other.reused, same.reused) == (0, 32)
    assert set(pages_of(verifier, other)).isdisjoint(pages_of(verifier, same))


def pages_of(verifier: TargetVerifier, caller: Caller) -> tuple[int, ...]:
    found = verifier.sessions.find(caller.session, 0, caller.length)
    assert found is not None
    return found.pages.indices


def test_two_share_pages_and_one_ends(folder: Path) -> None:
    """The other's cache stays, whoever takes the pages that were given back."""
    verifier = make_verifier(folder)
    prompt = some_ids(40)
    first, second = Caller(verifier, prompt), Caller(verifier, prompt)
    first.prefill()
    second.prefill()
    shared = pages_of(verifier, first)[:2]
    assert pages_of(verifier, second)[:2] == shared
    assert verifier.pool.pages_used == len({*pages_of(verifier, first), *pages_of(verifier, second)})
    before = [part.clone() for part in second.cache()]
    first.end()
    while verifier.pool.pages_used < verifier.pool.num_pages - 7:
        third = Caller(verifier, some_ids(40, seed=verifier.pool.pages_used))
        third.prefill()
        assert shared[0] not in pages_of(verifier, third)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second.cache(), before, strict=True))


def test_a_cached_page_is_evicted_when_somebody_needs_it(folder: Path) -> None:
    """The end of the sequence that was given back first goes first."""
    verifier = make_verifier(folder)
    old, young = Caller(verifier, some_ids(48)), Caller(verifier, some_ids(48, seed=1))
    for caller in (old, young):
        caller.prefill()
        caller.end()
    assert verifier.pool.pages_cached == 6
    pages = verifier.pool.reserve((verifier.pool.num_pages - 4) * PAGE)
    assert pages is not None
    verifier.pool.release(pages)
    again = [Caller(verifier, caller.ids) for caller in (old, young)]
    for caller in again:
        caller.prefill()
    assert [caller.reused for caller in again] == [PAGE, 2 * PAGE]


def test_sequences_that_open_together_follow_the_one_ahead(folder: Path) -> None:
    """None finds anything when it opens; later chunks take over what another has read meanwhile."""
    verifier, fresh = make_verifier(folder), make_verifier(folder)
    prompt = some_ids(70)
    ahead, behind = Caller(verifier, prompt), Caller(verifier, prompt)
    ahead.prefill(1)
    behind.prefill(1)
    ahead.prefill(40)
    counted = CountedTarget(verifier)
    got = behind.prefill(5)
    assert (behind.reused, behind.length, counted.rows) == (31, 37, 5)
    miss = Caller(fresh, prompt)
    expected = miss.prefill()
    assert torch.allclose(got.features, expected.features[32:37], atol=1e-4)
    ahead.prefill()
    assert behind.prefill().next_tokens.tolist() == expected.next_tokens.tolist()
    assert behind.length == 70
    assert behind.reused == 31 + 64 - 37
    assert torch.allclose(behind.cache()[0], miss.cache()[0], atol=1e-4)
    behind.end()
    ahead.end()
    assert verifier.pool.pages_used == 0


def random_tree(source: random.Random, nodes: int) -> TreeBatch:
    """Distinct (token, parent) pairs, parents before children."""
    pairs: dict[tuple[int, int], int] = {}  # and their depths
    depths = [0]
    while len(pairs) < nodes:
        pair = (source.randrange(VOCAB_SIZE), source.randrange(len(pairs) + 1))
        if pair not in pairs:
            pairs[pair] = depths[pair[1]] + 1
            depths.append(pairs[pair])
    tokens, parents = zip(*pairs, strict=True)
    return TreeBatch(ints(*tokens)[None], ints(*parents)[None], ints(*depths[1:])[None], ints(nodes))


def test_a_batch_over_shared_pages_is_each_tree_alone_without_sharing(folder: Path) -> None:
    together, alone = make_verifier(folder), make_verifier(folder)
    prompt, source = some_ids(3 * PAGE), random.Random(4)
    callers = [Caller(together, [*prompt[: PAGE * pages], *some_ids(5, pages)]) for pages in (1, 2, 3, 3)]
    singles = [Caller(alone, caller.ids, salt=str(place)) for place, caller in enumerate(callers)]
    roots = [int(caller.prefill().next_tokens[0]) for caller in callers]
    assert roots == [int(single.prefill().next_tokens[0]) for single in singles]
    assert [caller.reused for caller in callers] == [0, PAGE, 2 * PAGE, 3 * PAGE]
    trees = [random_tree(source, nodes) for nodes in (30, 3, 12, 12)]
    width = max(int(tree.counts[0]) for tree in trees)

    def pad(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])

    batch = TreeBatch(
        pad([tree.tokens for tree in trees]),
        pad([tree.parents for tree in trees]),
        pad([tree.depths for tree in trees]),
        ints(*(int(tree.counts[0]) for tree in trees)),
    )
    sessions = SessionBatch(
        torch.tensor([caller.session for caller in callers]),
        ints(0, 0, 0, 0),
        ints(*(caller.length for caller in callers)),
    )
    packed = together.verify(VerifyRequest(sessions, ints(*roots), batch))
    start = 0
    for place, (single, tree) in enumerate(zip(singles, trees, strict=True)):
        result = alone.verify(VerifyRequest(single.row, ints(roots[place]), tree))
        count = int(result.accepted_counts[0])
        assert int(packed.accepted_counts[place]) == count
        assert int(packed.bonus_tokens[place]) == int(result.bonus_tokens[0])
        assert torch.allclose(packed.features[start : start + count + 1], result.features, atol=1e-4)
        start += count + 1
    together.check_integrity()


def test_a_key_stands_for_all_ids_up_to_its_page_and_for_who_may_see_it() -> None:
    keys = PageKeys("draft", 4)
    ids = list(range(12))
    chain = keys.begin("").push(ids)
    assert len(set(chain)) == 3
    assert keys.begin("").push(ids[:7]) + keys.begin("").push([]) == chain[:1]
    in_pieces = keys.begin("")
    assert [key for count in range(12) for key in in_pieces.push([count])] == chain
    others = [
        keys.begin("").push([1, *ids[1:]]),  # another first page
        keys.begin("salt").push(ids),
        keys.begin("").push(ids[4:] + ids[:4]),  # the same pages at other places
        PageKeys("draft", 4).begin("").push(ids),  # another process
    ]
    for other in others:
        assert not set(other) & set(chain)
    assert keys.begin("").push([0, 1, 2, 3, 0, 1, 2, 3])[0] != keys.begin("").push([0, 1, 2, 3] * 2)[1]
