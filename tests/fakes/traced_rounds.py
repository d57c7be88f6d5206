"""Made-up rounds as a server traces them: consistent trees with an accepted path, in any number and words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ddtree_client.types import Result, Stats

WORDS = ("the", " sky", " is", " blue", "\n", " because", " light", ",", " scatters", ".")


def traced_answer(rounds: int, *, nodes: int = 12, words: Sequence[str] = WORDS, seed: int = 0) -> Result:
    """An answer of so many rounds; a token's id is its word's place in `words`."""
    source = random.Random(seed)
    root = source.randrange(len(words))
    trace: list[dict[str, Any]] = [
        {"round": 0, "drafting": "prefill", "emitted": _tokens([root], words), "finish_reason": ""}
    ]
    committed = 20
    for number in range(1, rounds + 1):
        tree = _tree(source, nodes, words)
        path = _path(source, tree)
        bonus = source.randrange(len(words))
        emitted = [*(tree["ids"][node - 1] for node in path), bonus]
        trace.append(
            {
                "round": number,
                "sequences": 1,
                "committed": committed,
                "draft_mode": "tree",
                "tree_budget": nodes,
                "drafting": "drafted" if nodes else "paused",
                "root": {"id": root, "text": words[root]},
                "nodes": tree,
                "nodes_verified": nodes,
                "accepted_path": path,
                "bonus": {"id": bonus, "text": words[bonus]},
                "stage_ms": {"draft": 3.0, "build_tree": 0.5, "verify": 9.0, "commit": 0.25},
                "cache_commit_ms": 0.5,
                "emitted": _tokens(emitted, words),
                "finish_reason": "length" if number == rounds else "",
            }
        )
        committed += len(emitted)
        root = bonus
    texts = [text for each in trace for text in each["emitted"]["texts"]]
    ids = tuple(token for each in trace for token in each["emitted"]["ids"])
    accepted = sum(len(each.get("accepted_path", ())) for each in trace)
    stats = Stats(20, len(ids), rounds, accepted, rounds * nodes, 1, 0.1, 0.1 + 0.01 * rounds)
    return Result("".join(texts), ids, "length", stats, trace=tuple(trace))


def _tokens(ids: Sequence[int], words: Sequence[str]) -> dict[str, list[Any]]:
    return {"ids": list(ids), "texts": [words[token] for token in ids]}


def _tree(source: random.Random, nodes: int, words: Sequence[str]) -> dict[str, list[Any]]:
    """Best first: a parent comes before its children, and no probability is above the one before."""
    ids: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    taken: set[tuple[int, int]] = set()
    while len(ids) < nodes:
        parent, token = source.randrange(len(ids) + 1), source.randrange(len(words))
        if (parent, token) not in taken:
            taken.add((parent, token))
            ids.append(token)
            parents.append(parent)
            depths.append(1 + (depths[parent - 1] if parent else 0))
    return {
        "ids": ids,
        "texts": [words[token] for token in ids],
        "parents": parents,
        "depths": depths,
        "path_probabilities": [0.9 * 0.93**place for place in range(nodes)],
    }


def _path(source: random.Random, tree: dict[str, list[Any]]) -> list[int]:
    """From the root downwards as far as chance lets it."""
    path: list[int] = []
    while True:
        end = path[-1] if path else 0
        children = [node for node, parent in enumerate(tree["parents"], start=1) if parent == end]
        if not children or source.random() < 0.2:
            return path
        path.append(source.choice(children))
