"""Grammars: what is refused and why, what may come next, and what pruning leaves of a tree."""

from __future__ import annotations

import json
import random

import pytest
import torch

from ddtree.errors import InvalidArgument
from ddtree.grammar import GrammarCompiler, Matcher, unpack_words
from ddtree.pruning import prune
from ddtree.sampling import SamplerState
from ddtree.sampling_spec import Grammar, GrammarKind, SamplingSpec
from ddtree.types import TreeBatch
from tests.fakes import tokenizers

VOCAB_SIZE, STOP = 400, 1
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizers.byte_level(), vocab_size=VOCAB_SIZE, stop_ids={STOP})


def ids(text: str) -> list[int]:
    found: list[int] = tokenizers.byte_level().encode(text, add_special_tokens=False)
    return found


def allowed(matcher: Matcher) -> set[int]:
    mask = unpack_words(matcher.allowed_words()[None], VOCAB_SIZE)
    assert mask.shape == (1, VOCAB_SIZE)
    return set(mask[0].nonzero()[:, 0].tolist())


def nested(levels: int) -> str:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(levels // 2):
        schema = {"anyOf": [schema]}
    return json.dumps(schema)


REFUSED: list[tuple[GrammarKind, str, str]] = [
    ("regex", "(", r"guided_regex cannot be used: .*unclosed group.*got '\('; correct it"),
    ("regex", "a{3,2}", "invalid repetition count range"),
    ("regex", r"(?=a)b", "look-around"),
    ("regex", "", "guided_regex must have 1 to 65536 bytes, got 0"),
    ("regex", "a" * 70_000, "guided_regex must have 1 to 65536 bytes, got 70000"),
    ("json", "{", "guided_json must be JSON, and is none"),
    ("json", "[" * 60_000, "guided_json must be JSON, and is none"),
    ("json", "[]", "guided_json must be an object, got 'list'"),
    ("json", '{"const": NaN}', "guided_json cannot be used: expected value"),
    ("json", '{"const": "\\ud800"}', "guided_json cannot be used: unexpected end of hex escape"),
    ("json", '{"minimum": 1e999}', "guided_json cannot be used: number out of range"),
    ("json", nested(40), "guided_json may be 32 levels deep, got 41; flatten"),
    ("json", '{"type": "foo"}', "guided_json cannot be used: Invalid type: foo"),
    ("json", '{"$ref": "http://x/y"}', "guided_json cannot be used: .*does not fetch"),
    ("json", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable schema"),
    ("json", '{"type": "string", "pattern": "("}', "unclosed group"),
    ("json", '{"not": {"type": "string"}}', "Unimplemented keys"),
    ("grammar", 'root ::= "a', "guided_grammar cannot be (used|read)"),
    ("grammar", 'root ::= missing', "guided_grammar cannot be (used|read)"),
    ("grammar", 'start: "a" | missing', "guided_grammar cannot be used"),
    ("choice", "[]", "guided_choice must hold 1 to 1024 strings"),
    ("choice", json.dumps([str(number) for number in range(1025)]), "guided_choice must hold 1 to 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "complaint"), REFUSED)
def test_what_cannot_guide_is_refused_with_the_reason(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint) as refusal:
        compiler.matcher(Grammar(kind, source))
    assert len(str(refusal.value)) < 500
    assert "\n" not in str(refusal.value)


def test_a_schema_at_the_limit_is_taken(compiler: GrammarCompiler) -> None:
    assert compiler.matcher(Grammar("json", nested(30))).advance(ids("null"))


def test_a_target_without_stop_token_cannot_be_guided() -> None:
    compiler = GrammarCompiler(tokenizers.byte_level(), vocab_size=VOCAB_SIZE, stop_ids=())
    with pytest.raises(InvalidArgument, match="guided_regex needs a target with a stop token"):
        compiler.matcher(Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json", '{"type": "object"}', ["{}", '{"a": [1, "b", null]}'], ['{"a":1}', "[]", "{ }", '{"a": 1']),
        ("regex", "[ab]{2,3}", ["ab", "aba"], ["a", "abab", "ac"]),
        ("grammar", 'root ::= x ("," x)*\nx ::= [0-9]+', ["1", "12,3"], ["", "1,", ",1"]),
        ("grammar", 'start: X ("," X)*\nX: /[0-9]+/', ["1", "12,3"], ["", "1,"]),
        ("choice", '["ä b", "a.c", "a"]', ["ä b", "a.c", "a"], ["abc", "ä", ""]),
    ],
)
def test_texts_are_taken_to_the_end_or_not(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, good: list[str], bad: list[str]
) -> None:
    for texts, is_good in ((good, True), (bad, False)):
        for text in texts:
            matcher = compiler.matcher(Grammar(kind, source))
            assert (matcher.advance(ids(text)) and STOP in allowed(matcher)) == is_good, text


def test_nothing_follows_the_stop_id(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "a+"))
    assert matcher.advance([*ids("a"), STOP])
    assert allowed(matcher) == {STOP}
    assert not matcher.fork().advance(ids("a"))


def test_special_tokens_and_padding_are_never_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "(.|\n)*"))
    special = {0, 2, 3, 4, 5}
    assert not allowed(matcher) & (special | set(range(len(tokenizers.byte_level()), VOCAB_SIZE)))
    assert len(allowed(matcher)) > 200


def test_forks_go_their_own_ways(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab|ac"))
    matcher.advance(ids("a"))
    before = allowed(matcher)
    assert matcher.fork().advance(ids("b"))
    other = matcher.fork()
    assert not other.advance(ids("z"))
    assert allowed(matcher) == allowed(other) == before
    assert matcher.failure is None


def trees(*rows: list[tuple[int, int]]) -> TreeBatch:
    width = max(len(row) for row in rows)
    tokens, parents, depths = (torch.zeros((len(rows), width), dtype=torch.int32) for _ in range(3))
    for index, row in enumerate(rows):
        for column, (token, parent) in enumerate(row):
            tokens[index, column], parents[index, column] = token, parent
            depths[index, column] = 1 + (int(depths[index, parent - 1]) if parent else 0)
    return TreeBatch(tokens, parents, depths, torch.tensor([len(row) for row in rows], dtype=torch.int32))


def path_of(tree: list[tuple[int, int]], node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, tree[node - 1][0])
        node = tree[node - 1][1]
    return path


def rows_of(batch: TreeBatch, index: int) -> list[tuple[int, int]]:
    count = int(batch.counts[index])
    return list(zip(batch.tokens[index, :count].tolist(), batch.parents[index, :count].tolist(), strict=True))


def guided(compiler: GrammarCompiler, grammar: Grammar, most: int) -> SamplerState:
    spec = SamplingSpec(grammar=grammar, max_nodes=most)
    return SamplerState(spec, vocab_size=VOCAB_SIZE, device=CPU, matcher=compiler.matcher(grammar))


@pytest.mark.parametrize("seed", range(6))
def test_pruning_keeps_exactly_the_paths_that_a_fresh_matcher_takes(
    compiler: GrammarCompiler, seed: int
) -> None:
    source = random.Random(seed)
    grammar = Grammar("regex", "a(b[ab]*|c+)?")
    letters = [*ids("a"), *ids("b"), *ids("c"), STOP]
    tree: list[tuple[int, int]] = []
    while len(tree) < 60:
        pair = (source.choice(letters), source.randrange(len(tree) + 1))
        if pair not in tree:
            tree.append(pair)
    root = ids("a")[0]
    most = source.choice([3, 100])
    batch = trees(tree, tree)
    pruned = prune(batch, [root, root], [guided(compiler, grammar, most), None])
    wanted = [
        path_of(tree, node)
        for node in range(1, len(tree) + 1)
        if compiler.matcher(grammar).advance([root, *path_of(tree, node)])
    ][:most]
    kept = rows_of(pruned, 0)
    assert [path_of(kept, node) for node in range(1, len(kept) + 1)] == wanted
    assert [int(depth) for depth in pruned.depths[0, : len(kept)]] == [len(path) for path in wanted]
    assert not pruned.tokens[0, len(kept) :].any()
    assert rows_of(pruned, 1) == tree
    assert rows_of(batch, 0) == tree, "the given trees stay as they were"


def test_without_a_grammar_nothing_is_copied(compiler: GrammarCompiler) -> None:
    batch = trees([(5, 0)])
    assert prune(batch, [1], [None]) is batch
    nothing = prune(batch, ids("a"), [guided(compiler, Grammar("regex", "ab"), 9)])
    assert nothing.counts.tolist() == [0]
    assert nothing.tokens.shape == (1, 0)
